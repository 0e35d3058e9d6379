// Memory that one thread uses during a call and keeps for the next: grown, never shrunk, not zeroed. `Threads` has one
// for each of its threads; what the caller prepares for all of them is its own.
#pragma once

#include <cstddef>

namespace headrace::model {

class Scratch {
 public:
  Scratch() = default;
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // At least so many bytes, 64-byte aligned; what was there before is gone. Throws std::bad_alloc.
  void* bytes(std::size_t count);

 private:
  void* memory_ = nullptr;
  std::size_t capacity_ = 0;
};

}  // namespace headrace::model
