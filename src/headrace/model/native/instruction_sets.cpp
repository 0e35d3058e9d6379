#include "instruction_sets.h"

#include <sys/syscall.h>
#include <unistd.h>

#include "errors.h"

namespace headrace::model {
namespace {

#if defined(HEADRACE_X86_KERNELS)

bool has_avx512_bf16() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bf16");
}

bool has_amx_bf16() {
  unsigned eax = 7, ebx = 0, ecx = 0, edx = 0;
  __asm__("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
  constexpr unsigned tile = 1u << 24, bf16 = 1u << 22;
  if ((edx & tile) == 0 || (edx & bf16) == 0) return false;
  constexpr long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

std::vector<const Products*> find() {
  std::vector<const Products*> found;
  if (!has_avx512_bf16()) return found;
  if (has_amx_bf16()) found.push_back(&kAmxProducts);
  found.push_back(&kAvx512Products);
  return found;
}

#else

std::vector<const Products*> find() { return {}; }

#endif

}  // namespace

const std::vector<const Products*>& all_products() {
  static const std::vector<const Products*> found = find();
  return found;
}

const Products& products_of(const std::string& instruction_set) {
  for (const Products* products : all_products())
    if (instruction_set == products->name) return *products;
  throw InputError("instruction_set", "must be one that this CPU has, is '" + instruction_set + "'");
}

}  // namespace headrace::model
