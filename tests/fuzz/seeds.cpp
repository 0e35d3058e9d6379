// What the fuzzers begin with, made by our own encoders: seeds FOLDER writes FOLDER/address and so on.
#include <filesystem>
#include <fstream>
#include <string>

#include "address.h"
#include "control/control_socket.h"
#include "control/lane.h"
#include "messages.h"

namespace {

using namespace headrace::fabric;

void write(const std::filesystem::path& folder, const std::string& name, const std::string& bytes) {
  std::filesystem::create_directories(folder);
  std::ofstream(folder / name, std::ios::binary) << bytes;
}

template <class T>
std::string raw(T value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof value);
}

void addresses(const std::filesystem::path& folder) {
  Address address{.host = own_host(), .control = "headrace-0-0123456789abcdef", .watch = "127.0.0.1:4711", .nics = {}};
  write(folder, "one_host", address.encode());
  for (int i = 0; i < 3; ++i) address.nics.push_back({"tcp;ofi_rxm", std::string(16, static_cast<char>(i))});
  write(folder, "three_nics", address.encode());
  address.nics.push_back({"shm", "headrace-0-shm-0123456789abcdef"});
  write(folder, "three_nics_and_shm", address.encode());
  write(folder, "nothing", Address{}.encode());
}

// Pieces of fuzz_frames, of one frame each.
void frames(const std::filesystem::path& folder) {
  for (const char wire : {0, 1, 2}) {
    for (std::uint32_t kind = 0; kind <= 10; ++kind) {
      std::string pieces(1, wire);
      for (const std::uint32_t each : {kind, std::uint32_t{9}}) {
        const FrameHead head{.magic = 0x48524331, .kind = each, .key = 77, .length = 4096};
        const bool brings = each == 2 || (each == 4 && wire == 0);
        const char num_files = wire == 1 ? 0 : each == 1 ? 2 : brings ? 1 : 0;
        pieces += std::string{static_cast<char>(sizeof head), num_files} + raw(head);
      }
      write(folder, std::to_string(wire) + "_" + std::to_string(kind), pieces);
    }
  }
}

void lanes(const std::filesystem::path& folder) {
  const std::string push = raw<std::uint8_t>(7) + raw<std::uint16_t>(300);
  const std::string fragment = raw<std::uint8_t>(8) + raw<std::uint16_t>(8192) + raw<std::uint16_t>(32);
  const std::string publish = raw<std::uint8_t>(9);
  const std::string read = raw<std::uint8_t>(5) + raw<std::uint16_t>(1024) + raw<std::uint8_t>(6);
  write(folder, "honest", push + fragment + publish + read);
  std::string full;
  for (int i = 0; i < 40; ++i) full += push + fragment + publish + (i % 4 == 0 ? read : "");
  write(folder, "full", full);
  for (const std::uint8_t count : {0, 1, 2, 3})
    write(folder, "moved_" + std::to_string(count),
          push + fragment + publish + raw(count) + raw<std::int32_t>(64) + raw<std::uint8_t>(1) + read);
  const std::size_t bytes_at = 4096 + Lane::kImms * 4;
  write(folder, "another_length",
        fragment + publish + raw<std::uint8_t>(4) + raw(static_cast<std::uint32_t>(bytes_at)) + raw<std::uint8_t>(8) +
            raw<std::uint64_t>(8193) + read);
}

void messages(const std::filesystem::path& folder) {
  const std::string begin = raw<std::uint8_t>(0) + raw<std::uint16_t>(3 * kPayload);
  const std::string send = raw<std::uint8_t>(16);
  write(folder, "whole", begin + send + send + send + send);
  write(folder, "two_senders",
        begin + send + raw<std::uint8_t>(1) + raw<std::uint16_t>(9000) + raw<std::uint8_t>(17) + send +
            raw<std::uint8_t>(17) + send);
  write(folder, "one_left_out", begin + send + raw<std::uint8_t>(4) + send + send);
  OutgoingMessage message;
  message.bytes = "a message of its own";
  std::string fragment(kFragment, '\0');
  fragment.resize(cut_fragment(message, 9, reinterpret_cast<std::byte*>(fragment.data())));
  write(folder, "as_it_is", raw<std::uint8_t>(12) + raw(static_cast<std::uint16_t>(fragment.size())) + fragment);
  write(folder, "changed",
        begin + send + raw<std::uint8_t>(8) + raw<std::uint8_t>(8) + raw<std::uint64_t>(std::uint64_t{1} << 40) +
            raw<std::uint8_t>(0) + send);
}

}  // namespace

int main(int, char** arguments) {
  const std::filesystem::path folder = arguments[1];
  addresses(folder / "address");
  frames(folder / "frames");
  lanes(folder / "lane");
  messages(folder / "messages");
}
