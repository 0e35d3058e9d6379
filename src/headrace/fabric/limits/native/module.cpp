// The Python face of the loops. Every loop runs without the GIL, in the caller's thread. _limits.pyi is the contract.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "copies.h"
#include "errors.h"
#include "streams.h"
#include "wakes.h"
#include "writes.h"

namespace headrace::fabric::limits {
namespace nb = nanobind;
using namespace nb::literals;
namespace {

using Unlocked = nb::call_guard<nb::gil_scoped_release>;
using Array = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::span<const std::int64_t> numbers(const Array& array) { return {array.data(), array.shape(0)}; }

// One uint64 array that owns its numbers.
nb::object to_array(std::vector<std::uint64_t> times) {
  auto* kept = new std::vector<std::uint64_t>(std::move(times));
  nb::capsule owner(kept, [](void* opaque) noexcept { delete static_cast<std::vector<std::uint64_t>*>(opaque); });
  return nb::ndarray<nb::numpy, std::uint64_t, nb::ndim<1>>(kept->data(), {kept->size()}, owner).cast();
}

// `act` without the GIL, what it took as (ns, cpu_ns).
template <class Act>
nb::tuple spent(Act act) {
  Spent told;
  {
    const nb::gil_scoped_release unlocked;
    told = act();
  }
  return nb::make_tuple(told.ns, told.cpu_ns);
}

template <class Act>
nb::object times(Act act) {
  std::vector<std::uint64_t> told;
  {
    const nb::gil_scoped_release unlocked;
    told = act();
  }
  return to_array(std::move(told));
}

std::vector<std::string> method_names() {
  std::vector<std::string> names;
  for (const CopyMethod& method : copy_methods()) names.emplace_back(method.name);
  return names;
}

void define_copies(nb::module_& module) {
  module.def("copy_methods", &method_names);
  nb::class_<CopyLoop>(module, "CopyLoop")
      .def(nb::init<int, std::size_t, int, std::size_t>(), "src_fd"_a, "src_length"_a, "dst_fd"_a, "dst_length"_a,
           Unlocked())
      .def(
          "copy",
          [](const CopyLoop& self, const Array& src, const Array& dst, std::size_t page_bytes,
             const std::string& method) {
            return spent([&] { return self.copy(numbers(src), numbers(dst), page_bytes, method); });
          },
          nb::arg("src_offsets").noconvert(), nb::arg("dst_offsets").noconvert(), "page_bytes"_a, "method"_a);
}

void define_wakes(nb::module_& module) {
  nb::class_<WakeLoop>(module, "WakeLoop")
      .def(nb::init<const std::string&, int, int, int>(), "kind"_a, "words_fd"_a, "ping_fd"_a, "pong_fd"_a)
      .def(
          "ping",
          [](WakeLoop& self, std::size_t num_rounds, std::uint64_t pause_ns) {
            return times([&] { return self.ping(num_rounds, pause_ns); });
          },
          "num_rounds"_a, "pause_ns"_a)
      .def("pong", &WakeLoop::pong, "num_rounds"_a, Unlocked());
}

void define_streams(nb::module_& module) {
  nb::class_<StreamLoop>(module, "StreamLoop")
      .def(nb::init<int, int, std::size_t>(), "socket"_a, "memory_fd"_a, "length"_a, Unlocked())
      .def(
          "send",
          [](StreamLoop& self, const Array& src, std::size_t page_bytes) {
            return spent([&] { return self.send(numbers(src), page_bytes); });
          },
          nb::arg("src_offsets").noconvert(), "page_bytes"_a)
      .def(
          "receive",
          [](StreamLoop& self, const Array& dst, std::size_t page_bytes) {
            return spent([&] { return self.receive(numbers(dst), page_bytes); });
          },
          nb::arg("dst_offsets").noconvert(), "page_bytes"_a)
      .def(
          "ping",
          [](StreamLoop& self, std::size_t num_rounds, std::uint64_t pause_ns) {
            return times([&] { return self.ping(num_rounds, pause_ns); });
          },
          "num_rounds"_a, "pause_ns"_a)
      .def("pong", &StreamLoop::pong, "num_rounds"_a, Unlocked());
}

nb::tuple target_of(const WriteLoop& loop) {
  const Target target = loop.target();
  return nb::make_tuple(nb::bytes(target.address.data(), target.address.size()), target.base, target.key,
                        target.length);
}

void define_writes(nb::module_& module) {
  nb::class_<WriteLoop>(module, "WriteLoop")
      .def(nb::init<const std::string&, const std::string&, int, std::size_t>(), "provider"_a, "node"_a, "memory_fd"_a,
           "length"_a, Unlocked())
      .def_prop_ro("target", &target_of)
      .def(
          "connect",
          [](WriteLoop& self, nb::bytes address, std::uint64_t base, std::uint64_t key, std::size_t length) {
            self.connect({.address = {address.c_str(), address.size()}, .base = base, .key = key, .length = length});
          },
          "address"_a, "base"_a, "key"_a, "length"_a)
      .def(
          "send",
          [](WriteLoop& self, const Array& src, const Array& dst, std::size_t page_bytes, std::size_t window) {
            return spent([&] { return self.send(numbers(src), numbers(dst), page_bytes, window); });
          },
          nb::arg("src_offsets").noconvert(), nb::arg("dst_offsets").noconvert(), "page_bytes"_a, "window"_a)
      .def(
          "receive",
          [](WriteLoop& self, std::size_t num_pages) { return spent([&] { return self.receive(num_pages); }); },
          "num_pages"_a)
      .def(
          "ping",
          [](WriteLoop& self, std::size_t num_rounds, std::uint64_t pause_ns) {
            return times([&] { return self.ping(num_rounds, pause_ns); });
          },
          "num_rounds"_a, "pause_ns"_a)
      .def("pong", &WriteLoop::pong, "num_rounds"_a, Unlocked());
}

// The classes of headrace.errors are looked up at each raise: rare, and no reference outlives the interpreter.
void raise_as(const char* name, nb::object arguments) {
  const nb::object kind = nb::module_::import_("headrace.errors").attr(name);
  const nb::object error = kind(*nb::borrow<nb::tuple>(arguments));
  PyErr_SetObject(kind.ptr(), error.ptr());
}

void translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const InputError& error) {
    raise_as("InputError", nb::make_tuple(error.field, error.what()));
  } catch (const FabricError& error) {
    raise_as("FabricError", nb::make_tuple(error.call, error.code, error.what()));
  }
}

}  // namespace

NB_MODULE(_limits, module) {
  nb::register_exception_translator(&translate);
  define_copies(module);
  define_wakes(module);
  define_streams(module);
  define_writes(module);
}

}  // namespace headrace::fabric::limits
