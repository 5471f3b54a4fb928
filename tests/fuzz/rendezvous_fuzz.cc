// Fuzzes what ranks and their rendezvous read from each other after they have authenticated: the
// input is a row of messages, as a server and as a rank would take them, and rank information by
// itself.

#include "collectives/launch/gathering.h"
#include "collectives/launch/rendezvous_wire.h"
#include "tests/fuzz/expect.h"

namespace {

using namespace baton::collectives;
namespace launch = baton::launch;

void read_info(std::string_view bytes) {
  const auto info = round_trip<RankInfo>(bytes);
  expect(!info.ok() || info->encode().size() <= launch::kMaxRankInfoBytes);
}

// Every answer must be one that a rank can read.
void check(const std::vector<launch::Gathering::Answer>& answers) {
  for (const auto& answer : answers) {
    for (const std::string& words : *answer.messages) {
      const auto message = launch::decode_message(words);
      expect(message.ok());
      const auto is = [&](launch::MessageType type) { return message->type == type; };
      expect(!is(launch::MessageType::kRefusal) || !launch::decode_refusal(message->body).ok());
      expect(!is(launch::MessageType::kRankInfo) || RankInfo::decode(message->body).ok());
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  read_info(bytes);

  std::string_view in = bytes;
  launch::Gathering fixed(2);
  launch::Gathering any(0);
  baton::Time now{};
  uint64_t connection = 0;
  // Each behind the length of its body, as in the seeds.
  for (uint32_t length = 0; in.size() >= sizeof length; ++connection) {
    std::memcpy(&length, in.data(), sizeof length);
    in.remove_prefix(sizeof length);
    if (length >= in.size()) return 0;
    const auto message = launch::decode_message(in.substr(0, length + size_t{1}));
    in.remove_prefix(length + size_t{1});
    if (!message.ok()) continue;
    if (message->body.size() > launch::kMaxBody) std::abort();
    read_info(message->body);
    if (launch::decode_refusal(message->body).ok()) std::abort();
    const auto join = launch::decode_join(message->body);
    if (!join.ok()) continue;
    now += std::chrono::milliseconds(1);
    for (launch::Gathering* gathering : {&fixed, &any}) {
      std::vector<launch::Gathering::Answer> answers;
      gathering->join(connection, *join, now, answers);
      gathering->expire(now, answers);
      check(answers);
    }
  }
  return 0;
}
