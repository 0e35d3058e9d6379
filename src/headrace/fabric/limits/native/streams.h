// The bare loop over a connected stream socket: pages are sent and received one after the other, with blocking calls,
// straight from and into mapped memory. One thread in each of the two processes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "region.h"
#include "spent.h"

namespace headrace::fabric::limits {

class StreamLoop {
 public:
  // `socket` is blocking and stays the caller's; the loop works on a duplicate.
  StreamLoop(int socket, int memory_fd, std::size_t length);
  StreamLoop(const StreamLoop&) = delete;
  StreamLoop& operator=(const StreamLoop&) = delete;
  ~StreamLoop();

  // From when the receiver says that it is there to when it says that it has everything.
  Spent send(std::span<const std::int64_t> src_offsets, std::size_t page_bytes);
  Spent receive(std::span<const std::int64_t> dst_offsets, std::size_t page_bytes);

  // Eight bytes there and back. See time_rounds.
  std::vector<std::uint64_t> ping(std::size_t num_rounds, std::uint64_t pause_ns);
  void pong(std::size_t num_rounds);

 private:
  void put(const void* from, std::size_t length);
  void get(void* to, std::size_t length);

  Region memory_;
  int socket_;
};

}  // namespace headrace::fabric::limits
