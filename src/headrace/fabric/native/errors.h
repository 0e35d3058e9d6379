// The three ways a native call refuses; module.cpp turns them into headrace.errors. Knows no Python.
#pragma once

#include <rdma/fi_errno.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace headrace::fabric {

struct InputError : std::invalid_argument {
  InputError(std::string field, const std::string& message) : std::invalid_argument(message), field(std::move(field)) {}
  std::string field;
};

struct FabricError : std::runtime_error {
  FabricError(std::string call, int code, const std::string& text)
      : std::runtime_error(text), call(std::move(call)), code(code) {}
  std::string call;
  int code;  // a positive errno, or what the CUDA driver answered
};

struct Closed : std::runtime_error {
  Closed() : std::runtime_error("the fabric was closed") {}
};

// libfabric answers with a count or a negative errno.
inline long check(const char* call, long rc) {
  if (rc < 0) throw FabricError(call, static_cast<int>(-rc), fi_strerror(static_cast<int>(-rc)));
  return rc;
}

}  // namespace headrace::fabric
