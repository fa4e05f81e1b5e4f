"""The schedules of hybrids, by name: one of linear and one of softmax attention, as in ``lasp-2+kv-all-gather``.

That one is LASP-2H (arXiv:2502.07563): the states of linear layers and the keys of softmax layers are gathered. There
all layers have contiguous shards; here those of softmax layers are zigzag under a causal mask, which balances the work
but moves hidden states.
"""

from __future__ import annotations

from typing import NamedTuple

from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.attention.registry import ATTENTION, attention_names, check_attention
from tasp_lab.schedules.attention.registry import options_of as attention_options_of
from tasp_lab.schedules.linear.registry import LINEAR, linear_spec

LASP_2H = "lasp-2+kv-all-gather"
"""The schedule of hybrids that was published with LASP-2, but for the shards of causal softmax layers."""

EXPECTED = f"LINEAR+SOFTMAX, such as {LASP_2H}"
"""The form of names, in messages."""


class Names(NamedTuple):
    """The names of the schedules of linear and of softmax layers."""

    linear: str
    softmax: str

    def of(self, letter: str) -> str:
        """The schedule of a layer of a pattern."""
        return self.linear if letter == "L" else self.softmax

    @property
    def together(self) -> str:
        """The name of the schedule of the hybrid.

        >>> Names("all-scan", "tasp").together
        'all-scan+tasp'
        """
        return f"{self.linear}+{self.softmax}"


def is_hybrid(name: str) -> bool:
    """Whether a name has the form of one of a hybrid."""
    return "+" in name


def names_of(name: str) -> Names:
    """The schedules of the layers of a hybrid, by its name.

    >>> names_of("lasp+usp:2x4")
    Names(linear='lasp', softmax='usp:2x4')

    Raises `ScheduleError` for a name of another form, and for unknown schedules or those of the other side.
    """
    linear, _, softmax = name.partition("+")
    if not (linear and softmax) or "+" in softmax:
        raise ScheduleError(f"schedule {name!r}, expected one for a hybrid: {EXPECTED}")
    try:
        linear_spec(linear)
        if softmax in LINEAR:
            raise ScheduleError(
                f"schedule {softmax!r} is for linear attention, expected one for softmax attention: "
                f"{', '.join(attention_names())}"
            )
        check_attention([softmax])
    except ScheduleError as error:
        raise ScheduleError(f"schedule {name!r}: {error}") from None
    return Names(linear, softmax)


def options_of(name: str) -> tuple[str, ...]:
    """The fields of `AttentionOptions`, without the passes, that apply to the layers of either kind.

    >>> options_of("all-scan+ulysses")
    ('pieces', 'gradient_dtype', 'result_dtype')
    """
    names = names_of(name)
    return tuple(dict.fromkeys((*LINEAR[names.linear].options, *attention_options_of(names.softmax))))


def options_for_layer(name: str, letter: str, options: AttentionOptions) -> AttentionOptions:
    """The options that a layer of a pattern knows. Raises `ScheduleError` for one that neither kind of layer knows."""
    names = names_of(name)
    options.check_known(name, options_of(name))
    return options.only(LINEAR[names.linear].options if letter == "L" else attention_options_of(names.softmax))


def uses_rings(name: str) -> bool:
    """Whether layers of either kind accept a decomposition."""
    names = names_of(name)
    return LINEAR[names.linear].uses_rings or ATTENTION[names.softmax.partition(":")[0]].uses_rings
