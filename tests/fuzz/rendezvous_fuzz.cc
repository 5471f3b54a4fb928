// Fuzzes what ranks and their rendezvous read from each other after they have authenticated: the
// input is a row of frames, as a server and as a rank would take them, and rank information by
// itself.

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "collectives/launch/gathering.h"
#include "collectives/launch/rendezvous_wire.h"

namespace {

using namespace baton::collectives;
namespace launch = baton::launch;

void read_info(std::string_view bytes) {
  const auto info = RankInfo::decode(bytes);
  if (!info.ok()) return;
  const std::string encoded = info->encode();
  const auto again = RankInfo::decode(encoded);
  if (encoded.size() > launch::kMaxRankInfoBytes || !again.ok() || again->encode() != encoded)
    std::abort();
}

// Every answer must be one that a rank can read.
void check(const std::vector<launch::Gathering::Answer>& answers) {
  for (const auto& answer : answers) {
    std::string in = *answer.frames;
    launch::Frame frame;
    while (!in.empty()) {
      const auto whole = launch::take_frame(in, frame);
      if (!whole.ok() || !*whole) std::abort();
      if (frame.type == launch::FrameType::kRefusal && launch::decode_refusal(frame.body).ok())
        std::abort();
      if (frame.type == launch::FrameType::kRankInfo && !RankInfo::decode(frame.body).ok())
        std::abort();
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  read_info(bytes);

  std::string in(bytes);
  launch::Gathering fixed(2);
  launch::Gathering any(0);
  baton::Time now{};
  uint64_t connection = 0;
  for (launch::Frame frame;; ++connection) {
    const auto whole = launch::take_frame(in, frame);
    if (!whole.ok() || !*whole) return 0;
    if (frame.body.size() > launch::kMaxFrameBody) std::abort();
    read_info(frame.body);
    if (launch::decode_refusal(frame.body).ok()) std::abort();
    const auto join = launch::decode_join(frame.body);
    if (!join.ok()) continue;
    now += std::chrono::milliseconds(1);
    for (launch::Gathering* gathering : {&fixed, &any}) {
      std::vector<launch::Gathering::Answer> answers;
      gathering->join(connection, *join, now, answers);
      gathering->expire(now, answers);
      check(answers);
    }
  }
}
