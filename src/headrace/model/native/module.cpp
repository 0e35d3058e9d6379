// The Python face of the kernels. Calls let the GIL go; what is checked is what is told once, a weight's or a step's
// shape. _cpu.pyi is the contract.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "attention.h"
#include "errors.h"
#include "instruction_sets.h"
#include "linear.h"
#include "norms.h"
#include "read.h"

namespace headrace::model {
namespace nb = nanobind;
using namespace nb::literals;
namespace {

using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Angles = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Int64s = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Address = std::uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

void require(bool right, const char* field, const std::string& message) {
  if (!right) throw InputError(field, message);
}

void require_shape(long num_outputs, long num_inputs) {
  require(num_outputs >= 1 && num_inputs >= 1, "weight",
          "must have at least one output and one input, has " + std::to_string(num_outputs) + " and " +
              std::to_string(num_inputs));
}

long packed_bytes(long num_outputs, long num_inputs) {
  require_shape(num_outputs, num_inputs);
  return num_panels(num_outputs) * panel_elements(num_inputs) * static_cast<long>(sizeof(Bf16));
}

long packed_gated_bytes(long num_outputs, long num_inputs) {
  require_shape(num_outputs, num_inputs);
  return packed_bytes(2 * round_up(num_outputs, kPanel / 2), num_inputs);
}

void require_room(const Bytes& packed, long wanted) {
  require(static_cast<long>(packed.size()) >= wanted, "packed",
          "must have " + std::to_string(wanted) + " bytes, has " + std::to_string(packed.size()));
  require(reinterpret_cast<Address>(packed.data()) % 64 == 0, "packed", "must begin at a multiple of 64 bytes");
}

class Weight {
 public:
  Weight(Bytes packed, long num_outputs, long num_inputs, std::optional<Floats> bias)
      : packed_(std::move(packed)), bias_(std::move(bias)) {
    require_room(packed_, packed_bytes(num_outputs, num_inputs));
    require(!bias_ || static_cast<long>(bias_->size()) == num_outputs, "bias", "must have a number for each output");
    view = {reinterpret_cast<const Bf16*>(packed_.data()), num_outputs, num_inputs, bias_ ? bias_->data() : nullptr};
  }
  PackedWeight view;

 private:
  Bytes packed_;
  std::optional<Floats> bias_;
};

Activation activation_of(const std::string& name) {
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  throw InputError("activation", "must be silu or gelu_tanh, is '" + name + "'");
}

class GatedWeight {
 public:
  GatedWeight(Bytes packed, long num_outputs, long num_inputs, const std::string& name)
      : activation(activation_of(name)), packed_(std::move(packed)) {
    require_room(packed_, packed_gated_bytes(num_outputs, num_inputs));
    view = {reinterpret_cast<const Bf16*>(packed_.data()), num_outputs, num_inputs, nullptr};
  }
  PackedWeight view;
  Activation activation;

 private:
  Bytes packed_;
};

template <class Array>
auto copied(const Array& array) {
  return std::vector<std::remove_const_t<typename Array::Scalar>>(array.data(), array.data() + array.size());
}

constexpr long kMostSlots = 1L << 40, kMostHeads = 1L << 16;  // far below where products of sizes overflow

class Step {
 public:
  Step(std::tuple<long, long, long> heads, std::tuple<long, long> pool, float scale, long window,
       const Int64s& positions, const Int64s& slots, const Int64s& qo_indptr, const Int64s& page_indptr,
       const Int64s& page_indices, const Angles& cos, const Angles& sin)
      : positions_(copied(positions)),
        slots_(copied(slots)),
        qo_indptr_(copied(qo_indptr)),
        page_indptr_(copied(page_indptr)),
        page_indices_(copied(page_indices)),
        cos_(copied(cos)),
        sin_(copied(sin)) {
    const auto [num_heads, num_kv_heads, dim] = heads;
    const auto [num_pages, page_size] = pool;
    require(num_kv_heads >= 1 && num_heads >= 1 && num_heads % num_kv_heads == 0 && num_heads <= kMostHeads, "heads",
            "of queries must be a multiple of those of KV, up to 65536");
    require(dim >= 32 && dim <= kMostDims && dim % 32 == 0, "heads",
            "must have a multiple of 32 dimensions, up to 512");
    require(num_pages >= 1 && page_size >= 1 && num_pages <= kMostSlots / page_size, "pool",
            "must have pages, and these tokens, 2^40 in all at most");
    require(scale > 0, "scale", "must be above 0");
    require(window >= 0, "window", "must be at least 1 token, or 0 for none");
    num_pages_ = num_pages;
    view = {.num_heads = num_heads,
            .num_kv_heads = num_kv_heads,
            .dim = dim,
            .page_size = page_size,
            .scale = scale,
            .window = window,
            .num_tokens = static_cast<long>(positions_.size()),
            .num_rows = static_cast<long>(qo_indptr_.size()) - 1,
            .positions = positions_.data(),
            .slots = slots_.data(),
            .qo_indptr = qo_indptr_.data(),
            .page_indptr = page_indptr_.data(),
            .page_indices = page_indices_.data(),
            .cos = cos_.data(),
            .sin = sin_.data(),
            .blocks = nullptr,
            .num_blocks = 0};
    check_indptr("qo_indptr", qo_indptr_, view.num_tokens);
    require(page_indptr_.size() == qo_indptr_.size(), "page_indptr", "must have an entry for each row, and one more");
    check_indptr("page_indptr", page_indptr_, static_cast<long>(page_indices_.size()));
    require(slots_.size() == positions_.size(), "slots", "must be one for each token");
    require(static_cast<long>(cos_.size()) == view.num_tokens * dim / 2 && sin_.size() == cos_.size(), "cos",
            "and sin must be [tokens, head_dim / 2]");
    check_rows();
    plan_blocks();
  }

  StepView view;

 private:
  static void check_indptr(const char* field, const std::vector<std::int64_t>& indptr, long end) {
    require(!indptr.empty() && indptr.front() == 0 && indptr.back() == end, field, "must lead from 0 to the end");
    for (std::size_t i = 1; i < indptr.size(); i++)
      require(indptr[i] > indptr[i - 1], field, "must rise from row to row");
  }

  // What would be read or written outside of the view, or read before it is written.
  void check_rows() const {
    for (const std::int64_t page : page_indices_)
      require(page >= 0 && page < num_pages_, "page_indices", "must be pages of the pool");
    for (long row = 0; row < view.num_rows; row++) {
      const long num_pages = page_indptr_[row + 1] - page_indptr_[row];
      for (long token = qo_indptr_[row]; token < qo_indptr_[row + 1]; token++) {
        const long position = positions_[token];
        const bool follows = token == qo_indptr_[row] || position == positions_[token - 1] + 1;
        require(position >= 0 && position < (1L << 30) && follows, "positions",
                "must count up within a row, from 0 on");
        require(position / view.page_size < num_pages, "page_indices", "must have pages for all positions of a row");
        const long page = page_indices_[page_indptr_[row] + position / view.page_size];
        require(slots_[token] == page * view.page_size + position % view.page_size, "slots",
                "must be the places of the positions in the row's pages");
      }
    }
  }

  // Longest rows first: with several threads the last to end is a short one.
  void plan_blocks() {
    for (long row = 0; row < view.num_rows; row++)
      for (long column = (view.num_columns(row) - 1) / kQueries * kQueries; column >= 0; column -= kQueries)
        for (long kv_head = 0; kv_head < view.num_kv_heads; kv_head++) blocks_.push_back({row, kv_head, column});
    view.blocks = blocks_.data();
    view.num_blocks = static_cast<long>(blocks_.size());
  }

  std::vector<std::int64_t> positions_, slots_, qo_indptr_, page_indptr_, page_indices_;
  std::vector<float> cos_, sin_;
  std::vector<QueryBlock> blocks_;
  long num_pages_ = 0;
};

class Kernels {
 public:
  Kernels(const std::string& instruction_set, const std::vector<int>& cpus, int num_threads)
      : products_(products_of(instruction_set)), threads_(cpus, num_threads), own_(new Scratch[num_threads]) {}

  void linear(const Weight& weight, Address inputs, long num_rows, Address out) {
    const nb::gil_scoped_release unlocked;
    model::linear(context(), weight.view, at<const Bf16>(inputs), num_rows, at<float>(out), false);
  }
  void linear_add(const Weight& weight, Address inputs, long num_rows, Address x) {
    const nb::gil_scoped_release unlocked;
    model::linear(context(), weight.view, at<const Bf16>(inputs), num_rows, at<float>(x), true);
  }
  void gated_linear(const GatedWeight& weight, Address inputs, long num_rows, Address out) {
    const nb::gil_scoped_release unlocked;
    model::gated_linear(context(), weight.view, weight.activation, at<const Bf16>(inputs), num_rows, at<Bf16>(out));
  }
  void rms_norm(Address x, Address weight, long num_rows, long size, float eps, Address out) {
    const nb::gil_scoped_release unlocked;
    model::rms_norm(context(), at<const float>(x), at<const float>(weight), num_rows, size, eps, at<Bf16>(out));
  }
  void add_rms_norm(Address x, Address values, Address weight, long num_rows, long size, float eps) {
    const nb::gil_scoped_release unlocked;
    model::add_rms_norm(context(), at<float>(x), at<const float>(values), at<const float>(weight), num_rows, size, eps);
  }
  void append(const Step& step, Address qkv, Address view, Address q,
              const std::optional<std::tuple<Address, Address, float>>& norms) {
    HeadNorm norm{nullptr, nullptr, 0};
    if (norms) norm = {at<const float>(std::get<0>(*norms)), at<const float>(std::get<1>(*norms)), std::get<2>(*norms)};
    const nb::gil_scoped_release unlocked;
    model::append(context(), step.view, at<const float>(qkv), at<Bf16>(view), at<Bf16>(q), norm);
  }
  void attend(const Step& step, Address q, Address view, Address out) {
    const nb::gil_scoped_release unlocked;
    model::attend(context(), step.view, at<const Bf16>(q), at<const Bf16>(view), at<Bf16>(out));
  }
  void close() {
    const nb::gil_scoped_release unlocked;
    threads_.close();
  }

  std::string instruction_set() const { return products_.name; }
  int num_threads() const { return threads_.size(); }

 private:
  Context context() { return {threads_, products_, prepared_, own_.get()}; }

  const Products& products_;
  Threads threads_;
  Scratch prepared_;
  std::unique_ptr<Scratch[]> own_;
};

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const Products* products : all_products()) names.emplace_back(products->name);
  return names;
}

void pack_address(Address packed, Address weight, long first_output, long num_outputs, long num_inputs) {
  const nb::gil_scoped_release unlocked;
  pack(at<Bf16>(packed), at<const Bf16>(weight), first_output, num_outputs, num_inputs);
}

void pack_gated_address(Address packed, Address gate, Address up, long num_outputs, long num_inputs) {
  const nb::gil_scoped_release unlocked;
  pack_gated(at<Bf16>(packed), at<const Bf16>(gate), at<const Bf16>(up), num_outputs, num_inputs);
}

double read_array(const Bytes& array, int passes) {
  require(passes >= 1, "passes", "must be at least 1");
  const nb::gil_scoped_release unlocked;
  return read(array.data(), array.size(), passes);
}

void raise_as(const char* name, const nb::object& arguments) {
  const nb::object type = nb::module_::import_("headrace.errors").attr(name);
  PyErr_SetObject(type.ptr(), arguments.ptr());
}

void translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const InputError& error) {
    raise_as("InputError", nb::make_tuple(error.field, error.what()));
  }
}

}  // namespace

NB_MODULE(_cpu, module) {
  nb::register_exception_translator(&translate);
  module.def("instruction_sets", &instruction_sets);
  module.def("packed_bytes", &packed_bytes, "num_outputs"_a, "num_inputs"_a);
  module.def("packed_gated_bytes", &packed_gated_bytes, "num_outputs"_a, "num_inputs"_a);
  module.def("pack", &pack_address, "packed"_a, "weight"_a, "first_output"_a, "num_outputs"_a, "num_inputs"_a);
  module.def("pack_gated", &pack_gated_address, "packed"_a, "gate"_a, "up"_a, "num_outputs"_a, "num_inputs"_a);
  module.def("read", &read_array, "array"_a, "passes"_a);
  nb::class_<Weight>(module, "Weight")
      .def(nb::init<Bytes, long, long, std::optional<Floats>>(), "packed"_a.noconvert(), "num_outputs"_a,
           "num_inputs"_a, "bias"_a.none());
  nb::class_<GatedWeight>(module, "GatedWeight")
      .def(nb::init<Bytes, long, long, const std::string&>(), "packed"_a.noconvert(), "num_outputs"_a, "num_inputs"_a,
           "activation"_a);
  nb::class_<Step>(module, "Step")
      .def(nb::init<std::tuple<long, long, long>, std::tuple<long, long>, float, long, const Int64s&, const Int64s&,
                    const Int64s&, const Int64s&, const Int64s&, const Angles&, const Angles&>(),
           nb::kw_only(), "heads"_a, "pool"_a, "scale"_a, "window"_a, "positions"_a, "slots"_a, "qo_indptr"_a,
           "page_indptr"_a, "page_indices"_a, "cos"_a, "sin"_a);
  nb::class_<Kernels>(module, "Kernels")
      .def(nb::init<const std::string&, const std::vector<int>&, int>(), "instruction_set"_a, "cpus"_a, "num_threads"_a)
      .def_prop_ro("instruction_set", &Kernels::instruction_set)
      .def_prop_ro("num_threads", &Kernels::num_threads)
      .def("close", &Kernels::close)
      .def("linear", &Kernels::linear, "weight"_a, "inputs"_a, "num_rows"_a, "out"_a)
      .def("linear_add", &Kernels::linear_add, "weight"_a, "inputs"_a, "num_rows"_a, "x"_a)
      .def("gated_linear", &Kernels::gated_linear, "weight"_a, "inputs"_a, "num_rows"_a, "out"_a)
      .def("rms_norm", &Kernels::rms_norm, "x"_a, "weight"_a, "num_rows"_a, "size"_a, "eps"_a, "out"_a)
      .def("add_rms_norm", &Kernels::add_rms_norm, "x"_a, "values"_a, "weight"_a, "num_rows"_a, "size"_a, "eps"_a)
      .def("append", &Kernels::append, "step"_a, "qkv"_a, "view"_a, "q"_a, "norms"_a.none())
      .def("attend", &Kernels::attend, "step"_a, "q"_a, "view"_a, "out"_a);
}

}  // namespace headrace::model
