"""The saved-tensor engine: every tensor that autograd keeps is kept, regenerated from a recipe, or offloaded.

An op or module *registers* its output with a recipe: how to make it again, and from what. While an engine is active, it
sees each tensor that autograd saves (torch.autograd.graph.saved_tensors_hooks). One that lies in a registered storage is
replaced by a handle; in backward the handle's recipe runs once, and all consumers of that storage share the result.

scope.py says which engine is active, engine.py what one does, recipe.py what it makes. csrc/saved has the parts that run in
every forward once more, in C++: where the extension is loaded, those serve.
"""

from .scope import active, current, is_watched, regenerating

__all__ = ["active", "current", "is_watched", "regenerating"]
