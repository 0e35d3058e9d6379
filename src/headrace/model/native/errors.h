// How a call refuses; module.cpp turns it into headrace.errors. Knows no Python.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace headrace::model {

struct InputError : std::invalid_argument {
  InputError(std::string field, const std::string& message) : std::invalid_argument(message), field(std::move(field)) {}
  std::string field;
};

}  // namespace headrace::model
