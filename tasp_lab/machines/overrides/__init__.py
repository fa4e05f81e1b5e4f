"""Overrides: numbers of a named machine or layer, changed by their names, like ``nic.bandwidth=x2``."""

from tasp_lab.machines.overrides.machine import overridden as overridden
from tasp_lab.machines.overrides.machine import override_names as override_names
from tasp_lab.machines.overrides.override import overridden_layer as overridden_layer
