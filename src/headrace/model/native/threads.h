// The threads that share one call: the caller is the first of them. Between calls the others wait, at first awake (the
// next call of a step comes after microseconds), then asleep. Owned by one `Kernels`; calls come from one thread at a
// time.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace headrace::model {

class Threads {
 public:
  // The others are pinned to cpus[1], cpus[2], .. where there are so many.
  Threads(const std::vector<int>& cpus, int num_threads);
  ~Threads() { close(); }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  int size() const { return static_cast<int>(others_.size()) + 1; }
  void close();

  // Calls work(i) on each thread i of [0, size()) and returns when all have.
  template <class Work>
  void run(Work work) {
    share([](void* context, int index) { (*static_cast<Work*>(context))(index); }, &work);
  }

 private:
  using Shared = void (*)(void* context, int index);
  void share(Shared shared, void* context);
  void loop(int index);

  std::vector<std::thread> others_;
  Shared shared_ = nullptr;  // null: leave
  void* context_ = nullptr;
  std::atomic<std::uint32_t> round_{0};
  std::atomic<std::uint32_t> num_busy_{0};
};

}  // namespace headrace::model
