// The address of a fabric: everything by which a peer may reach it, in one string of bytes. Pure: it parses what
// strangers send.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace headrace::fabric {

struct NicAddress {
  std::string provider;
  std::string name;  // what fi_getname says; of shm, the name of its control socket
  bool operator==(const NicAddress&) const = default;
};

struct Address {
  std::string host;     // equal where memory can be mapped by both: see `own_host`
  std::string control;  // of our control socket in the abstract name space; empty: nobody maps our memory
  std::string watch;    // where our heart is heard, "host:port"; empty: nowhere
  std::vector<NicAddress> nics;

  bool operator==(const Address&) const = default;
  std::string encode() const;
  // Of the control socket of a transport between peers of one host; empty where it has none.
  std::string control_of(const std::string& transport) const;
  // Throws InputError("address", ...).
  static Address decode(std::string_view wire);
};

// Of this process's kernel, user and name spaces: processes that have it in common see each other's pids and abstract
// sockets, and may open each other's memory.
std::string own_host();

}  // namespace headrace::fabric
