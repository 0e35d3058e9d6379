// A peer as its transport sees it: where writes and messages to it go, and the access it has here. Implemented by
// `RailLink` (libfabric between hosts), `MappedLink` (memory that both have mapped) and `ShmLink` (libfabric's shm).
// Owner thread only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "messages.h"
#include "transfers.h"

namespace headrace::fabric {

enum class Addressing : std::uint8_t { offset = 0, virtual_address = 1, mapped = 2 };  // interface.ADDRESSINGS

struct Descriptor {
  Addressing addressing = Addressing::offset;
  std::uint64_t base = 0;
  std::uint64_t length = 0;
  std::vector<std::uint64_t> keys;
  std::uint32_t generation = 0;
};

// What became of one attempt to post.
struct Posted {
  enum class Kind {
    under_way,  // a completion follows
    finished,   // and its source may be reused
    partly,     // as much as one turn may take; again, for the rest
    full,       // the peer takes nothing now
    failed,
  };
  Kind kind = Kind::under_way;
  std::uint64_t done = 0;  // of a write that is not finished: its bytes that were copied
  int code = 0;
  const char* call = "";
};

class Link {
 public:
  virtual ~Link() = default;

  virtual const std::string& transport() const = 0;
  // NICs that share what goes there.
  virtual std::size_t num_rails() const = 0;

  // The memory of `descriptor` is written from now on. Throws InputError where it cannot be written by this transport.
  virtual void connect(const Descriptor& descriptor) = 0;
  virtual Posted post_write(std::uint64_t peer, const std::byte* from, const Write& write) = 0;
  // The next fragment of `message`, whose place moves when it was posted.
  virtual Posted post_fragment(std::uint64_t peer, const std::shared_ptr<OutgoingMessage>& message) = 0;
  // After some of both. `more`: the next follow at once.
  virtual void flush(bool more) = 0;

  // `generation` is told in the descriptor. An earlier grant is withdrawn first.
  virtual Descriptor grant(std::uint32_t generation) = 0;
  // True: nothing of the peer can land any more. False: Transport tells when.
  virtual bool withdraw() = 0;
  // Nobody waits for what is under way any more.
  virtual void abandon(std::uint64_t peer) = 0;
};

}  // namespace headrace::fabric
