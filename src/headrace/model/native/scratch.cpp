#include "scratch.h"

#include <cstdlib>
#include <new>

namespace headrace::model {

Scratch::~Scratch() { std::free(memory_); }

void* Scratch::bytes(std::size_t count) {
  if (count <= capacity_) return memory_;
  const std::size_t wanted = (count + count / 4 + 4095) / 4096 * 4096;
  std::free(memory_);
  capacity_ = 0;
  memory_ = std::aligned_alloc(4096, wanted);
  if (!memory_) throw std::bad_alloc();
  capacity_ = wanted;
  return memory_;
}

}  // namespace headrace::model
