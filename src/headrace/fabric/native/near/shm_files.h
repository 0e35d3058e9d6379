// The files that libfabric's shm keeps in /dev/shm, one for each endpoint: named by us after the process whose they
// are, so that what one left that was killed can be told from what is in use. Owns nothing. Any thread.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

namespace headrace::fabric {

// Of the endpoint with that token of a process that lives here. Throws FabricError where it does not.
std::string shm_name(pid_t process, std::uint64_t token);

void remove_shm_file(const std::string& name);
bool has_shm_file(const std::string& name);

// Removes what processes have left that are no more.
void sweep_shm_files();

// Throws FabricError where /dev/shm has no room for `num` endpoints: one would be ended by SIGBUS when it is full.
void require_shm_room(std::uint64_t num);

}  // namespace headrace::fabric
