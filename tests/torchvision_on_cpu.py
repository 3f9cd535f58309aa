# Added to torchvision/extension.py by `make test-vllm`: PyPI has a wheel for CUDA, whose operators do not load beside a
# torch without it. vLLM's Qwen-VL imports torchvision, and uses none of them.

if not _has_ops():  # noqa: F821
    _defined = torch.library.Library("torchvision", "FRAGMENT")  # noqa: F821
    for _name in ("nms", "qnms"):
        _defined.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
