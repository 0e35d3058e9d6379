// One end of a pair of shm endpoints, through which a process writes another's memory. Owns the endpoint; knows neither
// lanes nor keys. Owner thread only.
//
// Neither end may be used while the other is: libfabric locks both with spin locks in shared memory, which a process
// that is stopped or killed holds for ever. Whoever uses it enters the pair's lane first.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "nics/endpoint.h"

namespace headrace::fabric {

class ShmEnd {
 public:
  // Throws FabricError, also where /dev/shm has no room.
  ShmEnd();
  // Its files are gone, nothing is under way there any more for us. The other end may still be used.
  ~ShmEnd();
  ShmEnd(const ShmEnd&) = delete;
  ShmEnd& operator=(const ShmEnd&) = delete;

  std::uint64_t token() const { return token_; }
  // To the end with that token of a process; once. Nobody else finds that one afterwards: its file is removed, so that
  // a process that is killed leaves none.
  void join(pid_t process, std::uint64_t token);

  Endpoint& endpoint() { return *endpoint_; }
  fi_addr_t other() const { return other_; }

 private:
  const std::uint64_t token_;
  const std::string name_;
  std::unique_ptr<Endpoint> endpoint_;
  fi_addr_t other_ = FI_ADDR_UNSPEC;
  std::string other_name_;
};

}  // namespace headrace::fabric
