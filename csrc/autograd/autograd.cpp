// All that speaks with torch's autograd: the functions of all ops, one file an op, and the engine of saved tensors. Together in one
// source: torch's headers take longer to compile than they do.
#include "autograd/autograd.h"

#include "autograd/act_dropout.h"
#include "autograd/attention.h"
#include "autograd/dropout.h"
#include "autograd/dropout_add.h"
#include "autograd/dropout_add_norm.h"
#include "autograd/layer_norm.h"
#include "autograd/rms_norm.h"
#include "saved/engine_type.h"

namespace ckpt {
namespace {

PyMethodDef method(const char* name, PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, nullptr};
}

// Functions that take what an autograd.Function in Python takes have its name; those that take an op's arguments, the op's.
PyMethodDef table[] = {
    method("ActDropout", functions::act_dropout::call),
    method("Attention", functions::attention::call),
    method("Dropout", functions::dropout::call),
    method("DropoutAdd", functions::dropout_add::call),
    method("DropoutAddLayerNorm", functions::dropout_add_norm::call<false>),
    method("DropoutAddRMSNorm", functions::dropout_add_norm::call<true>),
    method("layer_norm", functions::layer_norm::call),
    method("rms_norm", functions::rms_norm::call),
    {},
};

}  // namespace

bool add_autograd(PyObject* module) {
  PyTypeObject* engine = saved::type::ready();
  for (PyTypeObject* type : {saved::handle_type(), saved::stored_type()}) {
    if (PyType_Ready(type) != 0) return false;
  }
  return engine != nullptr && PyModule_AddType(module, engine) == 0 && PyModule_AddFunctions(module, table) == 0;
}

}  // namespace ckpt
