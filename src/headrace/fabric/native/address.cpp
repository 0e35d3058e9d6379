#include "address.h"

#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <cstdint>
#include <cstring>
#include <fstream>

#include "errors.h"

namespace headrace::fabric {
namespace {

constexpr std::string_view kMagic = "HRA1";
constexpr std::size_t kMaxAddresses = 9;  // the NICs of two providers, and shm

[[noreturn]] void refuse(const std::string& why) { throw InputError("address", "not an address of a fabric: " + why); }

void put(std::string& wire, std::string_view part) {
  if (part.size() > 255) throw InputError("address", "a part of it is longer than 255 bytes");
  wire.push_back(static_cast<char>(part.size()));
  wire.append(part);
}

class Reader {
 public:
  explicit Reader(std::string_view wire) : rest_(wire) {}

  std::uint8_t byte() { return static_cast<std::uint8_t>(take(1)[0]); }
  std::string part() { return std::string(take(byte())); }
  std::string_view take(std::size_t count) {
    if (count > rest_.size()) refuse("it ends early");
    const auto taken = rest_.substr(0, count);
    rest_.remove_prefix(count);
    return taken;
  }
  bool empty() const { return rest_.empty(); }

 private:
  std::string_view rest_;
};

std::string name_space(const char* kind) {
  struct stat status{};
  const std::string path = std::string("/proc/self/ns/") + kind;
  return ::stat(path.c_str(), &status) == 0 ? std::to_string(status.st_ino) : "?";
}

}  // namespace

std::string Address::encode() const {
  std::string wire(kMagic);
  put(wire, host);
  put(wire, control);
  put(wire, watch);
  wire.push_back(static_cast<char>(nics.size()));
  for (const NicAddress& nic : nics) {
    put(wire, nic.provider);
    put(wire, nic.name);
  }
  return wire;
}

std::string Address::control_of(const std::string& transport) const {
  if (transport == "mapped") return control;
  for (const NicAddress& nic : nics)
    if (nic.provider == transport) return nic.name;
  return {};
}

Address Address::decode(std::string_view wire) {
  Reader reader(wire);
  if (reader.take(kMagic.size()) != kMagic) refuse("it does not begin with HRA1");
  Address address;
  address.host = reader.part();
  address.control = reader.part();
  address.watch = reader.part();
  const std::size_t num_nics = reader.byte();
  if (num_nics > kMaxAddresses) refuse("it has " + std::to_string(num_nics) + " NICs");
  for (std::size_t i = 0; i < num_nics; ++i) {
    auto provider = reader.part();
    address.nics.push_back({.provider = std::move(provider), .name = reader.part()});
  }
  if (!reader.empty()) refuse("something follows it");
  return address;
}

std::string own_host() {
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  const std::string told = boot + "/" + name_space("pid") + "/" + name_space("net") + "/" + std::to_string(::geteuid());
  const XXH128_hash_t hash = XXH3_128bits(told.data(), told.size());
  std::string name(sizeof hash, '\0');
  std::memcpy(name.data(), &hash, sizeof hash);
  return name;
}

}  // namespace headrace::fabric
