#include "near/shm_files.h"

#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <system_error>

#include "errors.h"

namespace headrace::fabric {
namespace {

const std::string kFolder = "/dev/shm/";
const std::string kPrefix = "headrace-shm-";
constexpr std::uint64_t kMost = std::uint64_t{16} << 20;  // the length of an endpoint's file, of which 8 MiB are used

// Process numbers are given again, and mean something else in another name space.
std::string name_space() {
  struct stat status{};
  return ::stat("/proc/self/ns/pid", &status) == 0 ? std::to_string(status.st_ino) : "0";
}

// When it started, in ticks since the boot; nothing for one that has ended, or waits for its parent.
std::optional<std::string> start_of(const std::string& process) {
  std::string line;
  if (!std::getline(std::ifstream("/proc/" + process + "/stat"), line)) return std::nullopt;
  std::istringstream fields(line.substr(line.rfind(')') + 1));  // a name may hold anything
  std::string field;
  fields >> field;
  if (field == "Z" || field == "X") return std::nullopt;
  for (int i = 4; i <= 22; ++i) fields >> field;  // proc(5) counts from 1; the state was the third
  return field;
}

}  // namespace

std::string shm_name(pid_t process, std::uint64_t token) {
  const std::string number = std::to_string(process);
  const auto start = start_of(number);
  if (!start) throw FabricError("shm", ESRCH, "process " + number + " has ended");
  std::array<char, 17> hex{};
  std::snprintf(hex.data(), hex.size(), "%016llx", static_cast<unsigned long long>(token));
  return kPrefix + name_space() + "-" + number + "-" + *start + "-" + hex.data();
}

void remove_shm_file(const std::string& name) { ::unlink((kFolder + name).c_str()); }

bool has_shm_file(const std::string& name) { return ::access((kFolder + name).c_str(), R_OK | W_OK) == 0; }

void sweep_shm_files() {
  const std::string ours = kPrefix + name_space() + "-";
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(kFolder, error)) {
    const std::string name = entry.path().filename();
    if (!name.starts_with(ours)) continue;
    std::istringstream rest(name.substr(ours.size()));
    std::string process;
    std::string start;
    std::getline(rest, process, '-');
    std::getline(rest, start, '-');
    const bool is_number = !process.empty() && process.find_first_not_of("0123456789") == std::string::npos;
    if (is_number && start_of(process) != start) remove_shm_file(name);
  }
}

void require_shm_room(std::uint64_t num) {
  struct statvfs space{};
  if (::statvfs(kFolder.c_str(), &space) != 0)
    throw FabricError("shm", errno, "/dev/shm cannot be looked at, and holds every endpoint");
  const std::uint64_t free = space.f_bavail * space.f_frsize;
  if (free >= num * kMost) return;
  throw FabricError("shm", ENOSPC,
                    "/dev/shm has " + std::to_string(free >> 20) + " MiB free, must have " +
                        std::to_string((num * kMost) >> 20) + " (16 for each of " + std::to_string(num) + ")");
}

}  // namespace headrace::fabric
