// Fuzzes what the two ends of a KV session are told: the input is a message in each line, from an
// agent that decode loads from and prefill has blocks for. Whatever it says, a later message is
// answered, and nothing is written but the blocks that were ordered.
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "kvtransfer/session/direct_mover.h"
#include "tests/fuzz/expect.h"
#include "tests/kvtransfer/session_sides.h"
#include "tests/manual_clock.h"

namespace baton::kvtransfer {
namespace {

struct SessionWorld {
  SessionWorld() {
    const std::string at = absl::StrCat("127.0.0.1:", ours.its->port());
    expect(evil.its->ask_metadata("ours/0", at).ok());
    expect(ours.its->ask_metadata("evil/0", evil_at()).ok());
    const auto met = [this] {
      return evil.its->has_remote("ours/0") && ours.its->has_remote("evil/0");
    };
    for (int turn = 0; turn < 1'000'000 && !met(); ++turn) {
      evil.its->messages();
      ours.its->messages();
    }
    expect(met());
    metadata = absl::BytesToHexString(*evil.its->metadata());
  }
  std::string evil_at() const { return absl::StrCat("127.0.0.1:", evil.its->port()); }
  void tell(const std::string& text) { expect(evil.its->notify("ours/0", text).ok()); }

  void run(const std::string& input) {
    KvSessionOptions options;
    options.agent = ours.its.get();
    options.clock = &clock;
    options.start_thread = false;
    const auto session = *session::make_direct_session(ours.cache().dump(), std::move(options));
    const uint64_t send = session->open("s", 16);
    expect(session->save(send, 0, 0, {5}).ok());
    session->hold(send);
    for (const bool push : {false, true}) {
      KvOrder order{.id = push ? 2u : 1u,
                    .from = {.transfer = push ? "w" : "r", .agent = "evil", .address = evil_at()},
                    .timeout = std::chrono::seconds(10)};
      order.push = push;
      order.runs.push_back({0, {6}, {0, 16}});
      expect(session->load(std::move(order)).ok());
    }
    session->turn();
    // What a seed cannot know.
    const std::string text = absl::StrReplaceAll(
        input, {{"4096", absl::StrCat(evil.address())}, {"@metadata", metadata}});
    for (const absl::string_view line : absl::StrSplit(text, '\n')) {
      if (line.size() < 50000) tell(std::string(line));  // longer ones arrive out of order
    }
    const std::string marker = absl::StrCat("marker-", ++runs);
    tell(json{{"kind", "done"}, {"transfer", marker}, {"hears", true}}.dump());
    for (bool answered = false; !answered;) {
      session->turn();
      for (const AgentMessage& each : evil.its->messages()) {
        answered |= each.payload.find(marker) != std::string::npos;
      }
    }
    for (int i = 0; i < 4; ++i) session->turn();
    clock.advance(std::chrono::hours(25));
    session->turn();
    session->close();
    for (size_t i = 0; i < ours.memory.size(); ++i) {
      expect(i / kBytes == 6 || ours.memory[i] == std::byte{0});
    }
  }

  ManualClock clock;
  SessionSide ours{"ours/0", false}, evil{"evil/0", false};
  std::string metadata;
  uint64_t runs = 0;
};

}  // namespace
}  // namespace baton::kvtransfer

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static auto* const world = new baton::kvtransfer::SessionWorld;
  world->run({reinterpret_cast<const char*>(data), size});
  return 0;
}
