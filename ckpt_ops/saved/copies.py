"""Copies of a storage to other memory and back."""

import torch


class Copy:
    """A copy that is waited for."""

    def __init__(self, t, target):
        self._target, self._device, self._dtype = target, t.device, t.dtype
        self._begin(t)

    def _begin(self, t, non_blocking=False):
        source = torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())  # [nbytes]
        with torch.no_grad():
            self._target.copy_(source, non_blocking=non_blocking)

    def back(self, non_blocking=False):
        """A tensor of the original's dtype at the beginning of a new storage."""
        storage = torch.empty(self._target.shape, dtype=torch.uint8, device=self._device)
        storage.copy_(self._target, non_blocking=non_blocking)
        return torch.empty(0, dtype=self._dtype, device=self._device).set_(storage.untyped_storage())


class StreamCopy(Copy):
    """A copy to pinned memory on a side stream.

    The original is held until the compute stream waits for the copy: what is allocated in its place is used after that.
    """

    def __init__(self, t, target, module, side):
        self._module, self._side, self._modified = module, side, False
        self._original, self._version = t.detach(), t._version
        self._compute = module.current_stream(t.device)  # asked now, and outside of the side stream
        side.wait_stream(self._compute)
        super().__init__(t, target)

    def _begin(self, t):
        with self._module.stream(self._side):
            super()._begin(t, non_blocking=True)
            self._event = self._side.record_event()

    def settle(self):
        """Lets go of the original."""
        compute = self._module.current_stream(self._device)
        if compute == self._compute:
            compute.wait_event(self._event)
        else:
            self._event.synchronize()  # the memory is the other stream's, which must not wait for this one
        self._look()
        self._original = self._compute = self._side = None

    def back(self):
        self._look()
        if self._modified:
            raise RuntimeError(
                "ckpt_ops.offloading: a saved tensor was modified in place while it was being copied; with streams=False "
                "it would have been copied before that"
            )
        self._module.current_stream(self._device).wait_event(self._event)
        return super().back(non_blocking=True)

    def _look(self):
        if self._original is not None:
            self._modified = self._modified or self._original._version != self._version


def stream_module(device):
    """torch.cuda or its like for a device with streams, else None."""
    module = None if device.type == "cpu" else torch.get_device_module(device)
    return module if hasattr(module, "Stream") else None
