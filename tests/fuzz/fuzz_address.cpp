// The address of a fabric, as a stranger sends it: decoded, or refused by InputError; what was decoded is encoded to
// the same bytes.
#include <cstdint>
#include <string_view>

#include "address.h"
#include "errors.h"
#include "fuzzed.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using headrace::fabric::Address;
  const std::string_view wire(reinterpret_cast<const char*>(data), size);
  try {
    const Address address = Address::decode(wire);
    require(address.encode() == wire);
    require(Address::decode(address.encode()) == address);
  } catch (const headrace::fabric::InputError&) {
  }
  return 0;
}
