// Which products this CPU and this build have. Knows no Python.
#pragma once

#include <string>
#include <vector>

#include "products.h"

namespace headrace::model {

// Fastest first; none where the CPU has neither, or the build is for another architecture. AMX needs the kernel's
// leave, which is asked for here, once for the process.
const std::vector<const Products*>& all_products();

const Products& products_of(const std::string& instruction_set);  // throws InputError

}  // namespace headrace::model
