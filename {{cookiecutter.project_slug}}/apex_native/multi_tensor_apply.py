"""The name that scripts ask whether Apex's kernels are there."""


class MultiTensorApply:
    """Stands where Apex calls its kernels for many tensors, of which there are none here."""

    available = False

    def __call__(self, *args: object) -> None:
        """Raises RuntimeError."""
        raise RuntimeError(
            "apex_native has none of Apex's kernels: use torch's _foreach functions."
        )


multi_tensor_applier = MultiTensorApply()
