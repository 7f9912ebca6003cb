// The Python module over the C API: _C, or dlmkern_emulated when the CUDA sources are compiled for the
// emulator.
//
// A tensor comes as the tuple (data_ptr, dtype code, shape, stride), None for a NULL view; outputs are the
// caller's. Functions return None, release the GIL while they work, and raise ValueError or RuntimeError.
#include <pybind11/pybind11.h>

#include <string>

#include "dlmkern.h"

namespace py = pybind11;

namespace {

// A dlmkern_view that may be absent.
struct View {
  dlmkern_view view = {};
  bool present = false;

  const dlmkern_view* get() const { return present ? &view : nullptr; }
};

// Fails with a Python error set.
bool read_sizes(PyObject* sizes, int64_t* out, int32_t* count) {
  if (!PyTuple_Check(sizes) || PyTuple_GET_SIZE(sizes) > 4) return false;
  *count = static_cast<int32_t>(PyTuple_GET_SIZE(sizes));
  for (int32_t axis = 0; axis < *count; ++axis) {
    out[axis] = PyLong_AsLongLong(PyTuple_GET_ITEM(sizes, axis));
  }
  return PyErr_Occurred() == nullptr;
}

bool read_view(PyObject* source, View* out) {
  if (source == Py_None) return true;
  if (!PyTuple_Check(source) || PyTuple_GET_SIZE(source) != 4) return false;
  out->view.data = PyLong_AsVoidPtr(PyTuple_GET_ITEM(source, 0));
  out->view.dtype = static_cast<int32_t>(PyLong_AsLong(PyTuple_GET_ITEM(source, 1)));
  int32_t strides = 0;
  if (!read_sizes(PyTuple_GET_ITEM(source, 2), out->view.shape, &out->view.ndim)) return false;
  if (!read_sizes(PyTuple_GET_ITEM(source, 3), out->view.stride, &strides)) return false;
  out->present = true;
  return strides == out->view.ndim && PyErr_Occurred() == nullptr;
}

}  // namespace

namespace pybind11::detail {

template <>
struct type_caster<View> {
  PYBIND11_TYPE_CASTER(View, const_name("tuple[int, int, tuple[int, ...], tuple[int, ...]] | None"));

  bool load(handle source, bool) {
    const bool loaded = read_view(source.ptr(), &value);
    PyErr_Clear();
    return loaded;
  }
};

}  // namespace pybind11::detail

namespace {

void raise_error(const char* function, int code) {
  std::string message = std::string(function) + ": " + dlmkern_error_string(code);
  if (code <= DLMKERN_ERROR_CUDA) message += " (cudaError " + std::to_string(DLMKERN_ERROR_CUDA - code) + ")";
  if (code == DLMKERN_ERROR_UNAVAILABLE && dlmkern_cpu_isa() == std::string("unavailable")) {
    message += ": DLMKERN_CPU_ISA names an instruction set that is not to be had";
  }
  switch (code) {
    case DLMKERN_ERROR_NULL:
    case DLMKERN_ERROR_SHAPE:
    case DLMKERN_ERROR_DTYPE:
    case DLMKERN_ERROR_VALUE:
    case DLMKERN_ERROR_WORKSPACE:
      throw py::value_error(message);
    default:
      throw std::runtime_error(message);
  }
}

// What a C function takes for an argument of the Python function.
const dlmkern_view* pass(const View& view) { return view.get(); }
template <class Number>
Number pass(Number number) {
  return number;
}

void* as_pointer(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

// Binds `function` under the Python argument types Args, in the C function's order.
template <class... Args, class Function>
void bind(py::module_& m, const char* name, Function function) {
  m.def(name, [function, name](Args... arguments) {
    int code;
    {
      const py::gil_scoped_release unlocked;
      code = function(pass(arguments)...);
    }
    if (code != DLMKERN_OK) raise_error(name, code);
  });
}

// The same with stream at the end.
template <class... Args, class Function>
void bind_on_stream(py::module_& m, const char* name, Function function) {
  m.def(name, [function, name](Args... arguments, std::uintptr_t stream) {
    int code;
    {
      const py::gil_scoped_release unlocked;
      code = function(pass(arguments)..., as_pointer(stream));
    }
    if (code != DLMKERN_OK) raise_error(name, code);
  });
}

// The same with workspace_ptr, workspace_bytes and stream at the end.
template <class... Args, class Function>
void bind_cuda(py::module_& m, const char* name, Function function) {
  m.def(name,
        [function, name](Args... arguments, std::uintptr_t workspace, size_t bytes, std::uintptr_t stream) {
          int code;
          {
            const py::gil_scoped_release unlocked;
            code = function(pass(arguments)..., as_pointer(workspace), bytes, as_pointer(stream));
          }
          if (code != DLMKERN_OK) raise_error(name, code);
        });
}

}  // namespace

PYBIND11_MODULE(DLMKERN_MODULE, m) {
  using V = const View&;

  m.def("version", &dlmkern_version);
  m.def("has_cuda", [] { return dlmkern_has_cuda() != 0; });
  m.def("cpu_isa", &dlmkern_cpu_isa);
  m.def("cpu_set_isa", [](const char* name) {
    if (const int code = dlmkern_cpu_set_isa(name)) raise_error("cpu_set_isa", code);
  });

  bind<V, V, V, int64_t, V, V, V, V, V>(m, "cpu_token_stats", dlmkern_cpu_token_stats);
  bind<V, V, V, V>(m, "cpu_conflict_matrix", dlmkern_cpu_conflict_matrix);
  bind<V, V, V, V, V>(m, "cpu_independent_set", dlmkern_cpu_independent_set);
  bind<V, V, V, V, V, V, V, int, V, V>(m, "cpu_cap_select", dlmkern_cpu_cap_select);
  bind<V, int64_t, V, V, V>(m, "cpu_topk_snapshot", dlmkern_cpu_topk_snapshot);
  bind<V, V, V, V, V, V>(m, "cpu_topk_kl", dlmkern_cpu_topk_kl);
  bind<V, V, V, V, V, V, int, V>(m, "cpu_depga_block", dlmkern_cpu_depga_block);
  bind<V, V, V, int, V>(m, "cpu_confidence_select", dlmkern_cpu_confidence_select);
  bind<V, V, V, V, V, V, int, V>(m, "cpu_dapd_select", dlmkern_cpu_dapd_select);
  bind<V, V, V, V, V, int, int, V, V>(m, "cpu_cover_seeds", dlmkern_cpu_cover_seeds);
  bind<V, V, V, V, V, double, int64_t, V>(m, "cpu_cover_verify", dlmkern_cpu_cover_verify);
  bind<V, V, V, V, V, V, V, V>(m, "cpu_kv_block_write", dlmkern_cpu_kv_block_write);
  bind<V, V, V, V, V, V, double, V>(m, "cpu_attention_graph", dlmkern_cpu_attention_graph);
  bind<V, V, V, V, V, V, V, V, V, V, int, double, double>(m, "cpu_diagonal_correction",
                                                          dlmkern_cpu_diagonal_correction);

  m.def("cuda_token_stats_workspace", &dlmkern_cuda_token_stats_workspace);
  m.def("cuda_conflict_matrix_workspace", &dlmkern_cuda_conflict_matrix_workspace);
  m.def("cuda_independent_set_workspace", &dlmkern_cuda_independent_set_workspace);
  m.def("cuda_cap_select_workspace", &dlmkern_cuda_cap_select_workspace);
  m.def("cuda_topk_snapshot_workspace", &dlmkern_cuda_topk_snapshot_workspace);
  m.def("cuda_depga_block_workspace", &dlmkern_cuda_depga_block_workspace);
  m.def("cuda_dapd_select_workspace", &dlmkern_cuda_dapd_select_workspace);
  bind_cuda<V, V, V, int64_t, V, V, V, V, V>(m, "cuda_token_stats", dlmkern_cuda_token_stats);
  bind_cuda<V, V, V, V>(m, "cuda_conflict_matrix", dlmkern_cuda_conflict_matrix);
  bind_cuda<V, V, V, V, V>(m, "cuda_independent_set", dlmkern_cuda_independent_set);
  bind_cuda<V, V, V, V, V, V, V, int, V, V>(m, "cuda_cap_select", dlmkern_cuda_cap_select);
  bind_cuda<V, int64_t, V, V, V>(m, "cuda_topk_snapshot", dlmkern_cuda_topk_snapshot);
  bind_cuda<V, V, V, V, V, V, int, V>(m, "cuda_depga_block", dlmkern_cuda_depga_block);
  bind_cuda<V, V, V, V, V, V, int, V>(m, "cuda_dapd_select", dlmkern_cuda_dapd_select);
  bind_on_stream<V, V, V, V, V, V>(m, "cuda_topk_kl", dlmkern_cuda_topk_kl);
  bind_on_stream<V, V, V, int, V>(m, "cuda_confidence_select", dlmkern_cuda_confidence_select);
  bind_on_stream<V, V, V, V, V, int, int, V, V>(m, "cuda_cover_seeds", dlmkern_cuda_cover_seeds);
  bind_on_stream<V, V, V, V, V, double, int64_t, V>(m, "cuda_cover_verify", dlmkern_cuda_cover_verify);
  bind_on_stream<V, V, V, V, V, V, V, V>(m, "cuda_kv_block_write", dlmkern_cuda_kv_block_write);
  bind_on_stream<V, V, V, V, V, V, V, V, V, V, int, double, double>(m, "cuda_diagonal_correction",
                                                                    dlmkern_cuda_diagonal_correction);
}
