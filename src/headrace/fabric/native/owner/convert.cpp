#include "owner/convert.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "errors.h"

namespace headrace::fabric {
namespace nb = nanobind;
namespace {

constexpr std::int64_t kMaxRoute = 0xffff;

std::int64_t integer(nb::handle record, const char* name, const std::string& prefix) {
  std::int64_t value = 0;
  if (!nb::try_cast(record.attr(name), value)) throw InputError(prefix + name, "must be an integer of 64 bits");
  return value;
}

std::int64_t integer(nb::handle record, const char* name, const std::string& prefix, std::int64_t low,
                     std::int64_t high = kMaxInt) {
  return within(prefix + name, integer(record, name, prefix), low, high);
}

std::uint64_t unsigned_integer(nb::handle record, const char* name, const std::string& prefix) {
  std::uint64_t value = 0;
  if (!nb::try_cast(record.attr(name), value)) throw InputError(prefix + name, "must be in [0, 2**64)");
  return value;
}

std::vector<std::int64_t> indices(nb::handle record, const char* name, const std::string& prefix) {
  using Array = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
  Array array;
  if (!nb::try_cast(record.attr(name), array, false))
    throw InputError(prefix + name, "must be a contiguous array of one dimension and dtype int64");
  return std::vector<std::int64_t>(array.data(), array.data() + array.shape(0));
}

Pages to_pages(nb::handle record, const std::string& prefix, std::size_t num_pages) {
  Pages pages;
  pages.offset = integer(record, "offset", prefix);
  pages.layer_stride = integer(record, "layer_stride", prefix);
  pages.page_stride = integer(record, "page_stride", prefix);
  pages.indices = indices(record, "indices", prefix);
  if (pages.indices.size() != num_pages)
    throw InputError(prefix + "indices", "has " + std::to_string(pages.indices.size()) + " pages, positions has " +
                                             std::to_string(num_pages));
  return pages;
}

void read_shared(nb::handle record, const std::string& prefix, PageWrites& writes) {
  const std::int64_t layers = static_cast<std::int64_t>(kLayersPerStep);
  writes.positions = indices(record, "positions", prefix);
  writes.layer_begin = static_cast<std::uint32_t>(integer(record, "layer_begin", prefix, 0, layers));
  writes.layer_end = static_cast<std::uint32_t>(integer(record, "layer_end", prefix, writes.layer_begin, layers));
  writes.length = static_cast<std::uint64_t>(integer(record, "length", prefix, 0));
  writes.route = static_cast<std::uint16_t>(integer(record, "route", prefix, 0, kMaxRoute));
}

}  // namespace

std::int64_t within(const std::string& field, std::int64_t value, std::int64_t low, std::int64_t high) {
  if (low <= value && value <= high) return value;
  const std::string limit = high == kMaxInt ? "at least " + std::to_string(low)
                                            : "in [" + std::to_string(low) + ", " + std::to_string(high) + "]";
  throw InputError(field, "must be " + limit + ", is " + std::to_string(value));
}

std::uint32_t to_imm(std::int64_t imm) {
  return static_cast<std::uint32_t>(within("imm", imm, 0, std::numeric_limits<std::uint32_t>::max()));
}

PageWrites to_page_writes(nb::handle record) {
  PageWrites writes;
  read_shared(record, "writes.", writes);
  writes.src = to_pages(record.attr("src"), "writes.src.", writes.num_pages());
  writes.dst = to_pages(record.attr("dst"), "writes.dst.", writes.num_pages());
  return writes;
}

PageWrites to_page_reads(nb::handle record) {
  PageWrites reads;
  read_shared(record, "reads.", reads);
  reads.src = to_pages(record.attr("pages"), "reads.pages.", reads.num_pages());
  return reads;
}

LastWrite to_last_write(nb::handle record) {
  LastWrite last;
  last.src = static_cast<std::uint64_t>(integer(record, "src_offset", "last.", 0));
  last.dst = static_cast<std::uint64_t>(integer(record, "dst_offset", "last.", 0));
  last.length = static_cast<std::uint64_t>(integer(record, "length", "last.", 0));
  last.digests_at = static_cast<std::uint64_t>(integer(record, "digests_at", "last.", 0));
  return last;
}

Descriptor to_descriptor(nb::handle record) {
  const std::string prefix = "descriptor.";
  const auto addressing = nb::cast<std::string>(record.attr("addressing"));
  const auto known = std::ranges::find(kAddressings, addressing);
  if (known == kAddressings.end())
    throw InputError(prefix + "addressing", "must be 'offset', 'virtual', 'mapped' or 'cuda', is '" + addressing + "'");
  Descriptor descriptor;
  descriptor.addressing = static_cast<Addressing>(known - kAddressings.begin());
  descriptor.base = unsigned_integer(record, "base", prefix);
  descriptor.length = unsigned_integer(record, "length", prefix);
  if (!nb::try_cast(record.attr("keys"), descriptor.keys))
    throw InputError(prefix + "keys", "must be a tuple of integers in [0, 2**64)");
  descriptor.generation = static_cast<std::uint32_t>(integer(record, "generation", prefix, 0, 0xffffffff));
  return descriptor;
}

}  // namespace headrace::fabric
