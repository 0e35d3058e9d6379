// What every kernel is called with: the instructions, the threads, and memory for what lies between input and output.
#pragma once

#include "products.h"
#include "scratch.h"
#include "threads.h"

namespace headrace::model {

// `own[i]` is thread i's, `prepared` what the caller prepares for all of them. Grown before threads are set to work:
// nothing throws on one of them.
struct Context {
  Threads& threads;
  const Products& products;
  Scratch& prepared;
  Scratch* own;
};

// Of `count` things those of thread `index`: contiguous, in order.
struct Part {
  long begin, end;
};

constexpr Part part_of(long count, int index, int num_threads) {
  return {count * index / num_threads, count * (index + 1) / num_threads};
}

}  // namespace headrace::model
