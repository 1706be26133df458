"""A module's forward with something around it."""

import inspect
import threading
import types

import torch


class _Called(threading.local):
    module = None


class WrappedForward:
    """Stands for the forward of one module: an object in its __dict__, which copies and pickles with it.

    What `around` opens ends with the forward, however that ends. Forward hooks would not do: also those that are always
    called are not for a KeyboardInterrupt.
    """

    def __init__(self, module):
        self.module, self._inner = module, vars(module).get("forward")
        self._called = _Called()
        module.forward = self
        self._hook = module.register_forward_pre_hook(self._calls)

    def _calls(self, module, args):
        # A replica of torch.nn.DataParallel shares this object, and runs in a thread of its own. torch.compile, which cannot
        # read a module from there (torch 2.11), compiles no replica.
        if not torch.compiler.is_compiling():
            self._called.module = module

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "_called"}

    def __setstate__(self, state):
        vars(self).update(state, _called=_Called())

    @property
    def __signature__(self):
        return inspect.signature(self._forward(self.module))

    def __call__(self, *args, **kwargs):
        module = self.module
        if not torch.compiler.is_compiling():
            module, self._called.module = self._called.module or module, None
        return self.around(module, self._forward(module), args, kwargs)

    def _forward(self, module):
        return types.MethodType(type(module).forward, module) if self._inner is None else self._inner

    def around(self, module, forward, args, kwargs):
        raise NotImplementedError

    def remove(self):
        """Gives the module its forward back, unless another one has been put around this."""
        self._hook.remove()
        if vars(self.module).get("forward") is self:
            del self.module.forward
            if self._inner is not None:
                self.module.forward = self._inner
