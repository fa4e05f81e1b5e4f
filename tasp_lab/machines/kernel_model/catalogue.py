"""Kernels and GPUs by name: data files, names that others use, and what is assumed where nothing was measured."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec

from tasp_lab.core.errors import ProfileError, expected_one_of, unknown
from tasp_lab.machines.kernel_model.constants import (
    Gpu,
    KernelConstant,
    KernelFile,
    Passing,
    Variant,
    data_folder,
    gpus,
    read_kernel_file,
)
from tasp_lab.machines.kernel_model.designs import BLACKWELL, architecture, core_kernel, designs
from tasp_lab.machines.kernel_model.kernel import AttentionKernel

_FA2, _FA3 = "flash-attention-2", "flash-attention-3"
_GPU_PREFIXES = re.compile(r"^(fit|zhipu|nvidia|amd|instinct|geforce)[ -]+")
_GPU_SUFFIXES = re.compile(r"([ -](sxm\d?|class|80gb|40gb|hbm\d?e?|oam))+$|-sxm\d?-.*$")
_GPU_ALIASES = {
    "4090": "rtx-4090",
    "rtx4090": "rtx-4090",
    "rtx4090d": "rtx-4090d",
    "4090d": "rtx-4090d",
    "gh200": "h200",
}
_KERNEL_ALIASES = {
    "flash-attn": "flash-attention-2",
    "fa2": "flash-attention-2",
    "fa3": "flash-attention-3",
    "fa4": "flash-attention-4",
    "aiter-asm-a32": "aiter-asm",
    "ck": "flash-attention-2-ck",
    "tlx-fa": "triton-tlx",
    # kernel_source of ai-dynamo/aiconfigurator 095f58a5, whose rows these kernels were fitted to, and what engines call
    # their backends: SGLang (docs.sglang.io, advanced_features/attention_backend), TensorRT-LLM (attn_backend)
    "torch-flow": "tensorrt-llm",
    "trtllm": "tensorrt-llm",
    "trtllm-mha": "sglang-trtllm-gen",
    "flashinfer": "sglang-flashinfer",
    "vllm-flash-attn": "vllm-flash-attention-2",
    "vllm-flash-attn-fa3": "vllm-flash-attention-3",
    "vllm-flashinfer-trtllmprefill": "vllm-trtllm-gen",
    "rocm-aiter-fa": "aiter",  # vLLM: docs.vllm.ai, api/vllm/v1/attention/backends
    "cudnn-attn": "cudnn",  # vLLM-Omni: user_guide/diffusion/attention_backends
    "cudnn-attention": "cudnn",  # PyTorch: torch.nn.attention.SDPBackend
    "fusedattention": "cudnn",  # Transformer Engine: NVTE_FUSED_ATTN
}
_NOT_MEASURED = {
    **dict.fromkeys(("efficient-attention", "xformers"), ("memory-efficient attention of CUTLASS", (_FA2,))),
    **dict.fromkeys(("flex-attention", "triton-attn"), ("Triton's kernel of that library", ("triton", _FA2))),
    **dict.fromkeys(("math", "torch-native", "vanilla"), ("attention by separate products", (_FA2,))),
    **dict.fromkeys(("sage-attn", "sageattn", "sageattention"), ("attention in 8 bits", (_FA2,))),
    **dict.fromkeys(("trtllm-mla", "flashmla", "cutlass-mla"), ("latent attention", ("sglang-trtllm-gen", _FA3))),
    **dict.fromkeys(("rocm-attn", "rocm-aiter-unified-attn"), ("Triton with pages", ("flash-attention-2-ck",))),
}
"""Kernels that engines name (the pages above) and nobody measured in a public table: what they are, and the nearest
kernels that were, in this order."""
_WIDER = 0.26
"""A rate taken from another GPU by data sheets is known within this share, as 39 of 42 kernels are whose GPU was left
out (experiments/results/kernel_accuracy.md)."""


def gpu_alias(name: str) -> str:
    """The name of a GPU in our files; unknown names stay, in lower case.

    >>> gpu_alias("A100-PCIe"), gpu_alias("fit A800"), gpu_alias("zhipu H100-class"), gpu_alias("H100 80GB")
    ('a100-pcie', 'a800', 'h100', 'h100')
    """
    text = _GPU_PREFIXES.sub("", name.strip().lower().split("(")[0].strip())
    text = re.sub(r"[ _]+", "-", _GPU_SUFFIXES.sub("", text))
    return _GPU_ALIASES.get(text, text)


def kernel_alias(name: str) -> str:
    """The name of a kernel in our files, of one that a vendor or an engine uses; unknown ones stay, in kebab case.

    >>> kernel_alias("flash_attention_2"), kernel_alias("flash-attn 2.5.7"), kernel_alias("trtllm_mha")
    ('flash-attention-2', 'flash-attention-2', 'sglang-trtllm-gen')
    """
    text = re.sub(r"[ _]+", "-", name.strip().lower().split(":")[0])
    if match := re.fullmatch(r"flash-?attn-?v?([234])(\.[\w.]*)?", text):
        return f"flash-attention-{match[1]}"
    return _KERNEL_ALIASES.get(text, text)


def kernel_by_shape(
    name: str, passing: Passing = "forward", head_dim: int = 128, *, grouped: bool = False, value_dim: int | None = None
) -> str:
    """The kernel of a name (`kernel_alias`), of ``aiter`` the one that it takes for a call.

    `grouped`: with fewer KV heads than heads; `value_dim`: elements of values per head, as many as of keys if None.
    AITER has assembly for heads of 128, backward with as many KV heads as heads, and runs Composable Kernel else: so
    are its times (HazyResearch/HipKittens f09e9685, analysis/attn, of November 2025), though its backward assembly
    itself takes grouped heads (ROCm/aiter e4048607, op_tests/cpp/mha).

    >>> kernel_by_shape("aiter"), kernel_by_shape("aiter", head_dim=64), kernel_by_shape("aiter", "backward")
    ('aiter-asm', 'flash-attention-2-ck', 'aiter-asm-a16')
    """
    name = kernel_alias(name)
    if name != "aiter":
        return name
    if head_dim != 128 or value_dim not in (None, 128) or (passing == "backward" and grouped):
        return "flash-attention-2-ck"
    return "aiter-asm" if passing == "forward" else "aiter-asm-a16"


@cache
def _files() -> Mapping[tuple[str, str], Path]:
    """Data files by GPU and kernel."""
    return {(path.parent.name, path.stem): path for path in sorted(data_folder().glob("*/*.toml"))}


def gpu_names() -> list[str]:
    """GPUs whose constants are known."""
    return sorted(gpus())


_FROM: Mapping[str, Mapping[str, str]] = {
    "vllm-flash-attention-2": {"ampere": _FA2, "ada": _FA2},
    "vllm-flash-attention-3": {"hopper": _FA3},
    "sglang-flash-attention-3": {"hopper": _FA3, "ampere": _FA2, "ada": _FA2},
}
"""Kernels of serving engines, and by architecture whose constants they take where they were not measured. On Ampere and
Ada, FlashAttention-3 is the loop of FlashAttention-2."""


def kernel_names(gpu: str) -> list[str]:
    """Kernels of a GPU: those with a file for it, those of GPUs that it is like, and those that follow from them."""
    like = [gpu, *(gpus()[gpu].like if gpu in gpus() else ())]
    names = [kernel for each in like for of_gpu, kernel in _files() if of_gpu == each]
    derived = [name for name, bases in _FROM.items() if bases.get(architecture(gpu)) in names]
    return list(dict.fromkeys([*names, *derived]))


def attention_kernel(gpu: str, name: str) -> AttentionKernel:
    """A kernel on a GPU. A name that ends in ``.toml`` is a file, as ``tasp-lab calibrate --kernels`` writes it.

    >>> attention_kernel("h100", "flash-attention-3").name
    'flash-attention-3'

    Raises `ProfileError` for an unknown GPU or kernel, for what is no name, and for a file of another GPU.
    """
    key = gpu_alias(gpu)
    if not isinstance(name, str):
        raise ProfileError(f"kernel {name!r}: expected a name, one of {', '.join(kernel_names(key))}, or a .toml file")
    if name.endswith(".toml"):  # read each time: it may have been edited
        found = read_kernel_file(Path(name))
        if found.gpu != key:
            raise ProfileError(f"{name}: a kernel on {found.gpu}, expected one on {key}")
        return AttentionKernel(found.gpu_constants, found)
    if key not in gpus():
        raise ProfileError(unknown("GPU", gpu, gpu_names()))
    kernel = kernel_by_shape(name)
    if kernel not in kernel_names(key):
        raise ProfileError(_no_kernel(key, name))
    return _kernel(key, kernel)


def _no_kernel(gpu: str, name: str) -> str:
    """The message for a kernel that a GPU does not have, with the nearest one: of those listed, or of that library."""
    known, kernel = kernel_names(gpu), kernel_by_shape(name)
    if not (kernel in _NOT_MEASURED or any(kernel == measured for _, measured in _files())):
        return unknown(f"kernel of {gpu}", name, known)
    library = kernel.partition("-")[0]
    what, near = _NOT_MEASURED.get(kernel, (kernel, [each for each in known if each.startswith(library)]))
    found = next((f"{each} is the nearest there" for each in near if each in known), expected_one_of(kernel, known))
    return f"kernel {name!r}{f' ({what})' * (what != name)} was not measured on {gpu} or a GPU like it: {found}"


@cache
def _kernel(gpu: str, name: str) -> AttentionKernel:
    """A kernel from its own file, or borrowed."""
    own = _files().get((gpu, name))
    return AttentionKernel(gpus()[gpu], read_kernel_file(own)) if own else borrowed_kernel(gpu, name)


def borrowed_kernel(gpu: str, name: str) -> AttentionKernel:
    """A kernel as if it had not been measured on this GPU: scaled from the first GPU with one that it is like.

    A kernel of a serving engine that none of them has takes the constants of the kernel without pages.
    Raises `ProfileError` for a kernel that follows from no other GPU's.
    """
    own = gpus()[gpu]
    if like := next((gpus()[each] for each in own.like if (each, name) in _files()), None):
        scaled = [_scaled(each, own, like, name) for each in read_kernel_file(_files()[like.name, name]).variants]
        note = f"assumed: {name} as on {like.name}, its rate in proportion to the peaks of the data sheets"
        return AttentionKernel(own, KernelFile(gpu, name, tuple(scaled)), note)
    base = _FROM.get(name, {}).get(architecture(gpu))
    if base not in kernel_names(gpu):
        raise ProfileError(f"kernel {name} on {gpu}: measured on no other GPU that is like it")
    found = _kernel(gpu, base)
    notes = [*([found.note] if found.note else []), f"assumed: {name} as {base}, with pages"]
    variants = tuple(_with_pages(each, gpu, name) for each in found.file.variants)
    return AttentionKernel(own, KernelFile(gpu, name, variants), "; ".join(notes))


def _with_pages(variant: Variant, gpu: str, name: str) -> Variant:
    """A variant with the design of a kernel with pages; FlashAttention-2 then runs its kernel of split keys."""
    design = designs(gpu, name, variant.passing, variant.head_dim)[0]
    if variant.passing == "backward" or core_kernel(name) != "flash-attention-2":
        return msgspec.structs.replace(variant, design=design)
    rate, split = variant.rate, variant.split
    constant = KernelConstant(
        rate.value * split.value, rate.low * split.low, rate.high * split.high,
        f"assumed: {rate.value / 1e12:.4g} TFLOP/s times {split.value:.3g}, the speed with split keys; {rate.source}",
    )  # fmt: skip
    return msgspec.structs.replace(variant, design=design, rate=constant)


def _scaled(variant: Variant, gpu: Gpu, like: Gpu, kernel: str) -> Variant:
    """A variant on another GPU: tensor cores by the peaks of the data sheets, exponentials by those of an SM."""
    ratio, head_dim = gpu.peak_flops.value / like.peak_flops.value, variant.head_dim
    faster = like.exponentials.value / gpu.exponentials.value
    if core_kernel(kernel) == _FA2 and architecture(gpu.name) in BLACKWELL:
        faster = 1.0  # there its instructions reach a fifth of the tensor cores' peak, and hide the exponentials
    cost = variant.exponentials
    exponentials = KernelConstant(cost.value / faster, cost.low / faster, cost.high / faster, cost.source)
    of_exponentials = (head_dim + cost.value) / (head_dim + exponentials.value)
    rate = variant.rate.value * ratio * of_exponentials
    source = f"assumed: that of {like.name}, times the ratio of the peaks of {gpu.name} and {like.name}, {ratio:.3g}"
    if faster != 1:
        source += f", and {of_exponentials:.3g} for exponentials {faster:.3g} times as fast beside tensor cores"
    constant = KernelConstant(rate, rate * (1 - _WIDER), rate * (1 + _WIDER), source)
    found = designs(gpu.name, kernel, variant.passing, variant.head_dim)
    design = found[0] if len(found) == 1 else variant.design
    return msgspec.structs.replace(variant, rate=constant, exponentials=exponentials, design=design)
