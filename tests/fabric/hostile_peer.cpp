// A stranger who knows an endpoint's address and holds no key: sends it what no honest peer would.
// hostile_peer ADDRESS_IN_HEX MODE COUNT
#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

constexpr std::uint64_t kImm = 0x1234;
constexpr std::size_t kHeader = 32;

void check(const char* call, long rc) {
  if (rc >= 0) return;
  std::fprintf(stderr, "%s: %s\n", call, fi_strerror(static_cast<int>(-rc)));
  std::exit(2);
}

struct Stranger {
  fid_ep* endpoint = nullptr;
  fid_cq* queue = nullptr;
  fi_addr_t to = 0;
  long num_ended = 0;

  explicit Stranger(const std::string& address) {
    fi_info* hints = fi_allocinfo();
    hints->caps = FI_MSG | FI_RMA;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->ep_attr->type = FI_EP_RDM;
    hints->domain_attr->threading = FI_THREAD_DOMAIN;
    hints->fabric_attr->prov_name = ::strdup("tcp;ofi_rxm");
    fi_info* info = nullptr;
    check("fi_getinfo", fi_getinfo(FI_VERSION(1, 17), "127.0.0.1", nullptr, FI_SOURCE, hints, &info));
    fid_fabric* fabric = nullptr;
    fid_domain* domain = nullptr;
    fid_av* addresses = nullptr;
    fi_av_attr av_attr{};
    av_attr.type = FI_AV_TABLE;
    fi_cq_attr cq_attr{};
    cq_attr.format = FI_CQ_FORMAT_DATA;
    check("fi_fabric", fi_fabric(info->fabric_attr, &fabric, nullptr));
    check("fi_domain", fi_domain(fabric, info, &domain, nullptr));
    check("fi_av_open", fi_av_open(domain, &av_attr, &addresses, nullptr));
    check("fi_cq_open", fi_cq_open(domain, &cq_attr, &queue, nullptr));
    check("fi_endpoint", fi_endpoint(domain, info, &endpoint, nullptr));
    check("fi_ep_bind", fi_ep_bind(endpoint, &addresses->fid, 0));
    check("fi_ep_bind", fi_ep_bind(endpoint, &queue->fid, FI_TRANSMIT | FI_RECV));
    check("fi_enable", fi_enable(endpoint));
    check("fi_av_insert", fi_av_insert(addresses, address.data(), 1, &to, 0, nullptr) - 1);
  }

  void progress() {
    fi_cq_data_entry entry{};
    fi_cq_err_entry error{};
    const long count = fi_cq_read(queue, &entry, 1);
    if (count == 1) ++num_ended;
    if (count == -FI_EAVAIL && fi_cq_readerr(queue, &error, 0) == 1) ++num_ended;
  }
};

std::string from_hex(const std::string& hex) {
  std::string bytes;
  for (std::size_t i = 0; i < hex.size(); i += 2)
    bytes.push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  return bytes;
}

}  // namespace

int main(int, char** arguments) {
  Stranger stranger(from_hex(arguments[1]));
  const std::string mode = arguments[2];
  const long count = std::stol(arguments[3]);
  std::vector<fi_context2> contexts(static_cast<std::size_t>(count));
  std::vector<char> bytes(1 << 20, 'x');
  for (long i = 0; i < count; ++i) {
    fi_context2* context = &contexts[static_cast<std::size_t>(i)];
    long rc = -FI_EAGAIN;
    for (; rc == -FI_EAGAIN; stranger.progress()) {
      if (mode == "data") {  // a message that carries what looks like an imm
        rc = fi_senddata(stranger.endpoint, bytes.data(), 64, nullptr, kImm, stranger.to, context);
      } else if (mode == "oversized") {
        rc = fi_send(stranger.endpoint, bytes.data(), bytes.size(), nullptr, stranger.to, context);
      } else if (mode == "begun") {  // the first byte of a message of two, each time as another sender
        const std::uint32_t header[8] = {0x48524d31, 2, static_cast<std::uint32_t>(i), 1, 0, 0, 0, 0};
        std::memcpy(bytes.data(), header, kHeader);
        rc = fi_send(stranger.endpoint, bytes.data(), kHeader + 1, nullptr, stranger.to, context);
        if (rc == 0)  // the buffer is used again
          while (stranger.num_ended <= i) stranger.progress();
      } else {
        return 2;
      }
    }
    check("post", rc);
  }
  for (int i = 0; i < 50'000 && stranger.num_ended < count; ++i, ::usleep(100)) stranger.progress();
  for (int i = 0; i < 2'000; ++i, ::usleep(100)) stranger.progress();
  std::printf("ended %ld\n", stranger.num_ended);
  std::fflush(stdout);
  ::_exit(0);
}
