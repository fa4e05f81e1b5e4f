"""All steps of a check, in their order."""

from __future__ import annotations

from tasp_lab.validation.gpu_check.hardware import measure_ceiling, take_inventory
from tasp_lab.validation.gpu_check.results import check_all_kernels, check_schedules, check_training
from tasp_lab.validation.gpu_check.steps import Step
from tasp_lab.validation.gpu_check.table import check_losses, compare_schedules
from tasp_lab.validation.gpu_check.times import check_alignment, check_calibration, check_clock, check_overlap

STEPS: tuple[Step, ...] = (
    Step(
        0,
        "inventory",
        "the ranks run on the machine that is named: one GPU each, all of one kind, with peer access",
        "The job does not have the GPUs that you think it has, or NCCL cannot use them. Compare --nproc-per-node with "
        "nvidia-smi or rocm-smi, look at CUDA_VISIBLE_DEVICES, and run again with NCCL_DEBUG=INFO.",
        take_inventory,
    ),
    Step(
        1,
        "library ceiling",
        "how fast the communication library is without us; later steps are held against it",
        "NCCL or RCCL by itself fails or delivers wrong bytes. Run nccl-tests or rccl-tests; nothing of tasp-lab is "
        "involved yet.",
        measure_ceiling,
        min_ranks=2,
    ),
    Step(
        2,
        "kernels",
        "every attention kernel, dtype, mask and pass, and those of linear attention, agree with float64",
        "A kernel of this torch or flash-attn differs from the mathematics, or returns log-sum-exp in another form. "
        "Do not use results of this machine; send the record, with the versions in step 0.",
        check_all_kernels,
    ),
    Step(
        3,
        "schedules",
        "every schedule over every transport delivers every bit, also when messages and kernels are delayed at random",
        "Without delays: messages are matched wrongly. Only with delays: a dependency between streams is missing. "
        "Either is a fault of tasp-lab; send the record.",
        check_schedules,
    ),
    Step(
        4,
        "clock",
        "the executor times one message as the library does, and takes next to no time for nothing",
        "Measured times are those of our host code rather than of messages. Other processes on the cores, or a GPU "
        "whose clock is low, show up here, too: run again on an idle node before you send the record.",
        check_clock,
        min_ranks=2,
    ),
    Step(
        5,
        "calibration",
        "the bandwidth that predictions start from is that of the library",
        "Predictions of this machine would be wrong by as much. Look whether pairs of ranks differ (the routes in the "
        "record): another job on the links, or GPUs that the named machine connects otherwise.",
        check_calibration,
        min_ranks=2,
    ),
    Step(
        6,
        "alignment",
        "multi-ring is as fast where its rings do not divide a shard as where they do",
        "Messages start at addresses that the library copies slowly, so multi-ring is measured too slow. A fault of "
        "tasp-lab; send the record.",
        check_alignment,
        min_ranks=2,
    ),
    Step(
        7,
        "overlap",
        "how much of communication kernels hide, with normal and with high priority of messages",
        "Kernels and messages slow each other down more than they gain. Try CUDA_DEVICE_MAX_CONNECTIONS=1, compare the "
        "variables in step 0 with those in the guide to GPU nodes, and send both records.",
        check_overlap,
        min_ranks=2,
    ),
    Step(
        8,
        "training",
        "20 steps of training on all ranks have the losses of one process, and memory stays flat",
        "Gradients are wrong (losses differ), or buffers are not reused (memory grows). A fault of tasp-lab; send the "
        "record.",
        check_training,
    ),
    Step(
        9,
        "lost ranks",
        "a rank that raises and one that is killed are named within seconds, and no process is left",
        "A failing job would hang here. The record has the output of the group; look for processes on the GPUs "
        "before you start the next job.",
        check_losses,
        min_ranks=2,
    ),
    Step(
        10,
        "table",
        "what the prediction is worth: ring against multi-ring, and attention schedules, beside measured times",
        "A schedule fails outside of the checks before; the message names it. Large errors are no failure: they are "
        "what the record is for.",
        compare_schedules,
        min_ranks=2,
    ),
)
