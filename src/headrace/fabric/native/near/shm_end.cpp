#include "near/shm_end.h"

#include <unistd.h>

#include <map>
#include <mutex>
#include <utility>

#include "errors.h"
#include "keys.h"
#include "near/shm_files.h"

namespace headrace::fabric {
namespace {

// The ends of this process. Where both of a pair are here, libfabric 1.17 lets them share the mappings of their files,
// and each takes its own away as it is closed, though the other may be in the middle of a call. So each is closed when
// the other's user has done with it as well. Two owners may be two threads of two fabrics: hence a lock, and a table
// that is nobody's, like libfabric's own.
class EndsHere {
 public:
  void add(const std::string& name) {
    const std::lock_guard guard(mutex_);
    ends_[name];
  }

  // False where that end is of another process.
  bool use(const std::string& name) {
    const std::lock_guard guard(mutex_);
    const auto found = ends_.find(name);
    if (found == ends_.end()) return false;
    if (found->second.closing) throw FabricError("shm", ECONNRESET, "the other end is closed");
    ++found->second.num_users;
    return true;
  }

  void close(const std::string& name, std::unique_ptr<Endpoint> endpoint, const std::string& used) {
    const std::lock_guard guard(mutex_);
    ends_[name].closing = std::move(endpoint);
    if (const auto found = ends_.find(used); found != ends_.end()) --found->second.num_users;
    std::erase_if(ends_, [](const auto& each) { return each.second.closing && each.second.num_users == 0; });
  }

 private:
  struct End {
    int num_users = 0;
    std::unique_ptr<Endpoint> closing;
  };
  std::mutex mutex_;
  std::map<std::string, End> ends_;
};

EndsHere& ends_here() {
  static EndsHere& ends = *new EndsHere;  // libfabric's clean-up at exit comes first, and needs no help
  return ends;
}

std::string fresh_name(std::uint64_t token) {
  require_shm_room(1);
  return shm_name(::getpid(), token);
}

}  // namespace

ShmEnd::ShmEnd()
    : token_(random_key() | 1),  // 0 is nobody's
      name_(fresh_name(token_)),
      endpoint_(std::make_unique<Endpoint>("shm", Local{.name = name_})) {
  ends_here().add(name_);
}

ShmEnd::~ShmEnd() {
  remove_shm_file(name_);
  ends_here().close(name_, std::move(endpoint_), other_name_);
}

void ShmEnd::join(pid_t process, std::uint64_t token) {
  const std::string name = shm_name(process, token);
  // libfabric takes a name whose file is missing, and looks for it again with every write.
  const bool is_here = ends_here().use(name);
  if (is_here) other_name_ = name;
  if (!is_here && !has_shm_file(name)) throw FabricError("shm", ENOENT, "the other end has no file");
  other_ = endpoint_->insert(name + '\0');
  remove_shm_file(name);
}

}  // namespace headrace::fabric
