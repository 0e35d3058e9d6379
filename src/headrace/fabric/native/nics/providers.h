// What each libfabric provider is asked for, and what its answer must be. Owns nothing and opens nothing; any thread.
// The lines about efa and verbs were never run: no such NIC was at hand. They come from libfabric's manuals and
// sources, 1.17 to 2.6; decision 0014 says what was found there.
#pragma once

#include <rdma/fabric.h>

#include <algorithm>
#include <cstdint>
#include <string>

namespace headrace::fabric {

constexpr std::uint32_t kHeaders = FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION);

// What this provider can do, read when it was opened.
struct Traits {
  std::string provider;
  bool virtual_addressing = false;
  bool provider_keys = false;
  bool local_registration = false;
  bool endpoint_registration = false;
  bool ordered_messages = false;
  bool emulated_writes = false;  // the receiver's processor carries them out
  bool lasting_regions = false;  // it keeps registrations that were closed, for later ones of the same memory
  std::uint64_t mr_key_size = 0;
  std::uint64_t cq_data_size = 0;
  std::uint64_t inject_size = 0;
  std::uint64_t iov_limit = 0;
  std::uint64_t rma_iov_limit = 0;
  std::uint64_t tx_size = 0;
  std::uint64_t rx_size = 0;
  std::uint64_t max_message = 0;
  bool wait_fd = false;

  bool is_efa() const { return provider.starts_with("efa"); }
  bool is_shm() const { return provider == "shm"; }
  bool is_verbs() const { return provider.starts_with("verbs"); }
  // A NIC writes into our memory. It does so until the registration is closed, and never afterwards.
  bool is_rdma() const { return is_efa() || is_verbs(); }
};

// Where to listen. An empty node is the provider's choice, port 0 a fresh one. efa has neither addresses nor ports that
// could be chosen: there the node is a NIC's name.
struct Local {
  std::string node{};
  std::uint16_t port = 0;
  std::string name{};  // of shm's file
};

// Writes of one shm endpoint that may be under way.
constexpr std::uint64_t kShmWrites = 32;

struct Asked {
  std::uint32_t api = 0;
  std::uint64_t caps = 0;
  std::string address{};  // to bind to
  std::string port{};
  std::string domain{};     // of that name alone
  std::uint64_t num_out{};  // room for so many, 0: as many as the provider likes
  std::uint64_t num_in{};
};
Asked plan_ask(const std::string& provider, const Local& local, bool on_device);

// Throws FabricError where it lacks what every transfer needs.
void require_traits(const Traits& traits);

}  // namespace headrace::fabric
