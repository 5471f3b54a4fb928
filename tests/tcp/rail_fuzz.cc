// Fuzzes a tcp rail behind the handshake: a peer that has the key sends any frames, correctly
// sealed, while the rail has a write and a read of its own open. The input is a row of frames.
// Whatever comes: memory that was not shared stays as it was, what may only be read is not written,
// and each slice of the rail's own is reported once.

#include <array>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "tests/tcp/raw_peer.h"
#include "transport/base/log.h"
#include "transport/base/wire.h"

namespace baton::tcp {
namespace {

using framed::Frame;
using framed::FrameType;

constexpr size_t kShared = 8192;
constexpr size_t kAround = 512;  // before and behind it
constexpr int kMostFrames = 64;

void expect(bool good) {
  if (!good) std::abort();
}

// One for all runs, as it is one for all peers.
struct Target {
  TcpNode node{"fuzzed", {{"tcp.sockets", "1"}, {"tcp.buffer_kib", "64"}}};
  std::string address = *node.provider->listen();
  std::vector<char> memory = std::vector<char>(kShared + 2 * kAround, 'x');
  std::vector<char> readable = std::vector<char>(kShared, 'r');
  std::vector<char> own = std::vector<char>(kShared, 'o');
  RemoteRegion shared = share(memory.data() + kAround, kShared, Access::kRemoteReadWrite);
  RemoteRegion only_read = share(readable.data(), kShared, Access::kRemoteRead);

  RemoteRegion share(char* data, size_t bytes, Access access) {
    return node.regions.describe(
        **node.regions.add(reinterpret_cast<std::byte*>(data), bytes, access, {}));
  }
};

Target& target() {
  base::set_log_level(base::LogLevel::kError);
  static Target& made = *new Target;  // its listener outlives all
  return made;
}

// Mostly what a correct peer could send, so that a run does not end with its first frame.
Frame frame_of(base::WireReader& in, const Target& to, std::vector<framed::WirePiece>& pieces) {
  Frame frame;
  const uint8_t kind = in.number<uint8_t>();
  const uint8_t bent = in.number<uint8_t>();  // the fields that are not as they should be
  frame.type = static_cast<FrameType>(1 + kind % 7);
  frame.transfer = {in.number<uint8_t>() % 4U, 1};
  frame.slice = bent & 1 ? in.number<uint32_t>() : 0;
  const bool asks = frame.type == FrameType::kWrite || frame.type == FrameType::kRead;
  const bool answers = frame.type == FrameType::kWriteAck || frame.type == FrameType::kReadEnd;
  if (frame.type == FrameType::kReadData) frame.bytes = in.number<uint16_t>() % 4096;
  if (answers && (bent & 2) != 0) frame.code = static_cast<absl::StatusCode>(kind / 7 % 18);
  if (frame.type == FrameType::kReadEnd) frame.slice_offset = in.number<uint16_t>();
  if (asks) {
    const RemoteRegion& region = bent & 4 ? to.only_read : to.shared;
    frame.region = region.index;
    frame.generation = region.generation;
    frame.key = region.key ^ (bent & 8 ? 1 : 0);
    const size_t count = in.number<uint8_t>() % 4;
    for (size_t i = 0; i < count; ++i) {
      const uint64_t offset = bent & 16 ? in.number<uint64_t>() : in.number<uint16_t>() % kShared;
      pieces.push_back({offset, in.number<uint16_t>() % 2048U});
      frame.bytes += pieces.back().bytes;
    }
    frame.pieces = static_cast<uint32_t>(pieces.size());
  }
  if (frame.type == FrameType::kWrite) {
    frame.flags = bent & 32 ? in.number<uint8_t>() : framed::kLast;
    frame.slice_offset = bent & 64 ? in.number<uint16_t>() : 0;
    frame.slice_bytes = frame.slice_offset + frame.bytes + (bent & 64 ? in.number<uint16_t>() : 0);
    frame.total_bytes = frame.slice_bytes;
    frame.counter_generation = kind / 7 % 2;
    frame.increment = frame.counter_generation;
  }
  if (bent & 128) {
    frame.bytes = in.number<uint32_t>();
    frame.slice_bytes = in.number<uint64_t>();
    frame.total_bytes = in.number<uint64_t>();
    frame.counter = in.number<uint32_t>();
  }
  return frame;
}

std::string next_frame(base::WireReader& in, const Target& to) {
  std::vector<framed::WirePiece> pieces;
  Frame frame = frame_of(in, to, pieces);
  const std::string text(in.take(frame.type == FrameType::kReadData ? 0 : in.number<uint8_t>()));
  frame.text = static_cast<uint32_t>(text.size());
  const size_t payload = std::min<size_t>(frame.payload_bytes(), 8192);
  return encoded(frame, pieces, text + std::string(payload, 'p'));
}

void start_own(Target& to) {
  const RemoteRegion there{.key = 1, .size = kShared, .index = 1, .generation = 1};
  to.node.transfers.clear();
  to.node.next_slot = 0;
  to.node.done.clear();
  for (const Op op : {Op::kWrite, Op::kRead}) {
    auto& transfer = to.node.transfer(op, to.own, Layout::contiguous(0, 4096), there,
                                      Layout::contiguous(0, 4096));
    expect(to.node.rails[0]->post({&transfer, 0, 0, 4096}, to.node));
  }
}

void run(std::string_view input) {
  Target& to = target();
  RawPeer peer;
  peer.connect(to.node, to.address);
  expect(to.node.rails.size() == 1);
  start_own(to);
  base::WireReader in(input);
  for (int i = 0; i < kMostFrames && !in.failed() && !to.node.rails.empty(); ++i) {
    if (!peer.send(next_frame(in, to))) break;
    to.node.progress();
    char answers[16 << 10];
    while (::recv(peer.fd(), answers, sizeof answers, MSG_DONTWAIT) > 0) {
    }
  }
  peer.reset();
  until({&to.node}, [&] { return to.node.rails.empty(); });
  expect(to.node.done.size() == 2);
  expect(to.node.done[0].transfer.slot != to.node.done[1].transfer.slot);
  for (size_t i = 0; i < kAround; ++i) {
    expect(to.memory[i] == 'x' && to.memory[kAround + kShared + i] == 'x');
  }
  for (const char c : to.readable) expect(c == 'r');
  to.node.landed.clear();
  to.node.notes.clear();
  to.node.down.clear();
}

}  // namespace
}  // namespace baton::tcp

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  baton::tcp::run({reinterpret_cast<const char*>(data), size});
  return 0;
}
