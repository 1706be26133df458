"""Triton's interpreter, at half its time: it dresses up the whole language again for every function that a kernel calls.

`InterpretedFunction.__call__` patches triton.language's functions where a kernel has patched them already.
"""


def patch_once():
    """Leaves out what is patched already, until the launch that patched it ends."""
    import triton.language as tl
    from triton.runtime import interpreter

    original, patched = interpreter._patch_lang, set()

    def patch(fn):
        found = {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}
        new = found - patched
        if not new:
            return interpreter._LangPatchScope()
        scope = original(fn)
        patched.update(new)
        restore = scope.restore

        def restored():
            patched.difference_update(new)
            restore()

        scope.restore = restored
        return scope

    interpreter._patch_lang = patch
