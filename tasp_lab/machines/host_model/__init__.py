"""Host models: how long the host of a rank takes to issue the messages and kernel calls of a layer.

`tasp_lab.machines.host_model.runtime` has the numbers of each library that runs layers; `sim.host` follows from them
when each message and call of a schedule is issued.
"""
