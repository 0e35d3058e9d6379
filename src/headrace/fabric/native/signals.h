// Signal handlers of the process, kept over calls that replace them. Debian's libfabric loads PSM, which installs its
// own for SIGINT, SIGTERM, SIGSEGV and others; Ctrl-C would then end Python without a KeyboardInterrupt.
#pragma once

#include <signal.h>

#include <array>

namespace headrace::fabric {

class SignalHandlers {
 public:
  SignalHandlers() {
    for (int number = 1; number < kSignals; ++number)
      known_[number] = ::sigaction(number, nullptr, &handlers_[number]) == 0;
  }
  SignalHandlers(const SignalHandlers&) = delete;
  SignalHandlers& operator=(const SignalHandlers&) = delete;
  ~SignalHandlers() {
    for (int number = 1; number < kSignals; ++number)
      if (known_[number]) ::sigaction(number, &handlers_[number], nullptr);
  }

 private:
  static constexpr int kSignals = 32;
  std::array<struct sigaction, kSignals> handlers_{};
  std::array<bool, kSignals> known_{};
};

// Every signal is left to the threads of Python.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t all;
    ::sigfillset(&all);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) ::sigdelset(&all, fault);
    ::pthread_sigmask(SIG_BLOCK, &all, &before_);
  }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;
  ~BlockedSignals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace headrace::fabric
