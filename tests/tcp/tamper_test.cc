// Somebody between two workers who changes, repeats, moves, adds or leaves out bytes: it costs a
// connection, and nothing else. What was open goes on over the next one and lands once.
#include <linux/sockios.h>
#include <sys/ioctl.h>

#include "tests/tcp/faulty_network.h"
#include "tests/tcp/tcp_pair.h"
#include "tests/test.h"
#include "transport/framed/frame.h"
#include "transport/net/seal.h"
#include "transport/worker.h"

namespace baton::tcp {
namespace {

constexpr size_t kTamperedBytes = 3000;  // of a write: one frame
constexpr size_t kHead = framed::kHeaderBytes + framed::kPieceBytes;

class Tamper : public testing::TestWithParam<const char*>, protected FaultyPair {
 protected:
  void SetUp() override {
    start(a_, "a", GetParam());
    start(b_, "b", "");
    counter_ = *b_.worker->allocate_counter();
    // However busy the machine is, the side that dialled calls again before the other one does, and
    // there is one rail.
    time_moves_ = true;
    call();
    until([&] { return a_.worker->peer_state(a_.peer) == PeerState::kUp; });
    run_out();
  }

  void start(TcpSide& side, const std::string& name, const std::string& protection) const {
    // The clock runs while the kernel takes its time: nobody's patience may end of that.
    SettingValues settings = {{"tcp.sockets", "1"},
                              {"tcp.stall_ms", "3600000"},
                              {"tcp.handshake_ms", "3600000"},
                              {"peer.redial_ms", "3600000"},
                              {"peer.answer_ms", "3600000"}};
    if (!protection.empty()) settings.emplace_back(protection, "on");
    side.start({.name = name, .clock = &clock_, .settings = std::move(settings)},
               pattern(4 * kTamperedBytes, static_cast<uint64_t>(name[0])));
  }

  // Time stands still while bytes are held: the kernel may be late, and nobody is lost for it.
  void hold(FaultyNetwork::Direction direction, bool on) {
    network_->hold(direction, on);
    time_moves_ = !on;
  }
  bool protected_payload() const { return *GetParam() != '\0'; }
  size_t frame_bytes() const {
    return net::kSealBytes + kHead + kTamperedBytes + (protected_payload() ? net::kSealTag : 0);
  }
  size_t lost() const { return a_.worker->stats().peers_lost + b_.worker->stats().peers_lost; }

  TransferId submit(size_t at, Op op = Op::kWrite) {
    return a_.worker
        ->submit(
            {.op = op,
             .peer = a_.peer,
             .local = a_.region,
             .local_layout = Layout::contiguous(at, kTamperedBytes),
             .remote = b_.remote,
             .remote_layout = Layout::contiguous(at, kTamperedBytes),
             .counter = op == Op::kWrite ? b_.worker->remote_counter(counter_) : RemoteCounter(),
             .increment = op == Op::kWrite ? 1u : 0u})
        .value();
  }
  // `writes` writes leave a, `change` does to their bytes what it likes, and they go on to b.
  void expect_survived(const std::string& what, const std::function<void(std::string&)>& change,
                       size_t writes = 1) {
    const size_t lost_before = lost();
    const uint64_t counted = b_.worker->counter_value(counter_);
    std::fill(b_.memory.begin(), b_.memory.end(), 'x');
    hold(FaultyNetwork::kThere, true);
    std::vector<TransferId> open;
    for (size_t i = 0; i < writes; ++i) open.push_back(submit(i * kTamperedBytes));
    std::string& bytes = network_->lines().back().under_way[FaultyNetwork::kThere];
    until([&] { return bytes.size() >= writes * frame_bytes(); });
    ASSERT_EQ(bytes.size(), writes * frame_bytes()) << what;
    change(bytes);
    hold(FaultyNetwork::kThere, false);
    until([&] { return lost() > lost_before; });
    for (const TransferId id : open) {
      until([&] { return ended_at_a(id); });
      EXPECT_TRUE(a_.worker->wait(id).ok()) << what;
    }
    until([&] { return a_.worker->peer_state(a_.peer) == PeerState::kUp; });
    run_out();
    EXPECT_EQ(b_.worker->counter_value(counter_), counted + writes) << what;
    EXPECT_EQ(0, std::memcmp(b_.memory.data(), a_.memory.data(), writes * kTamperedBytes)) << what;
    for (size_t i = writes * kTamperedBytes; i < b_.memory.size(); ++i) {
      ASSERT_EQ(b_.memory[i], 'x') << what << " wrote to " << i;
    }
  }
  static std::function<void(std::string&)> flip(size_t at) {
    return [at](std::string& bytes) { bytes[at] = static_cast<char>(bytes[at] ^ 0x10); };
  }

  CounterId counter_;
};

// Promise(security): A changed, forged, repeated or dropped tcp frame costs the connection only |
//   each header has a tag over its number and bytes
TEST_P(Tamper, AChangedHeadIsNoticed) {
  expect_survived("the length of a head", flip(0));
  expect_survived("its magic", flip(net::kSealPrefix));
  expect_survived("its type", flip(net::kSealPrefix + 2));
  expect_survived("its transfer", flip(net::kSealPrefix + 8));
  expect_survived("its region", flip(net::kSealPrefix + 32));
  expect_survived("its key", flip(net::kSealPrefix + 40));
  expect_survived("its increment", flip(net::kSealPrefix + 80));
  expect_survived("where a piece goes", flip(net::kSealPrefix + framed::kHeaderBytes + 1));
  expect_survived("how long a piece is", flip(net::kSealPrefix + kHead - 4));
  expect_survived("the tag, its first byte", flip(net::kSealPrefix + kHead));
  expect_survived("the tag, its last byte", flip(net::kSealBytes + kHead - 1));
}

TEST_P(Tamper, ARepeatedFrameIsNoticed) {
  expect_survived("a write, twice", [](std::string& bytes) { bytes += bytes; });
}

TEST_P(Tamper, FramesOutOfTheirOrderAreNoticed) {
  const size_t frame = frame_bytes();
  expect_survived(
      "two writes, exchanged",
      [&](std::string& bytes) { bytes = bytes.substr(frame) + bytes.substr(0, frame); }, 2);
  expect_survived(
      "the first of two writes, left out", [&](std::string& bytes) { bytes.erase(0, frame); }, 2);
}

TEST_P(Tamper, InjectedBytesAreDetected) {
  expect_survived("noise before a write", [](std::string& bytes) { bytes.insert(0, 200, 'n'); });
  // A frame of another connection, whose keys are others.
  net::Sealer stranger(net::KeyPair::make().private_key, net::Protection::kHeads);
  std::string forged(net::kSealBytes + framed::kHeaderBytes, '\0');
  framed::encode_header({.type = framed::FrameType::kCancelRead}, forged.data() + net::kSealPrefix);
  stranger.head(forged.data(), framed::kHeaderBytes);
  expect_survived("a forged frame", [&](std::string& bytes) { bytes.insert(0, forged); });
}

TEST_P(Tamper, AChangedPayloadIsNoticedWhereItHasATag) {
  if (!protected_payload()) GTEST_SKIP() << "payload has no tag";
  const size_t payload = net::kSealBytes + kHead;
  expect_survived("the first byte of payload", flip(payload));
  expect_survived("the last byte of payload", flip(payload + kTamperedBytes - 1));
  expect_survived("the tag of payload", flip(payload + kTamperedBytes));
  const size_t frame = frame_bytes();
  expect_survived(
      "the payloads of two writes, exchanged",
      [&](std::string& bytes) {
        const size_t body = frame - payload;
        const std::string first = bytes.substr(payload, body);
        bytes.replace(payload, body, bytes.substr(frame + payload, body));
        bytes.replace(frame + payload, body, first);
      },
      2);
}

// The counter is held back until the tag has come, and not only until the bytes have.
// Promise(security): With `tcp.integrity` or `tcp.encrypt` nothing is announced before its tag was
//   checked | a slice is announced after the tag of its last frame
TEST_P(Tamper, NothingIsAnnouncedBeforeItsTag) {
  hold(FaultyNetwork::kThere, true);
  const TransferId id = submit(0);
  std::string& bytes = network_->lines().back().under_way[FaultyNetwork::kThere];
  until([&] { return bytes.size() == frame_bytes(); });
  const std::string last = bytes.substr(bytes.size() - 1);
  bytes.pop_back();
  hold(FaultyNetwork::kThere, false);
  time_moves_ = false;
  // Until the kernel has them at b's socket: it takes its time.
  const int to_b = network_->lines().back().ends[1];
  until([&] {
    int unacknowledged = 1;
    return bytes.empty() && ioctl(to_b, SIOCOUTQ, &unacknowledged) == 0 && unacknowledged == 0;
  });
  run_out();
  EXPECT_EQ(b_.worker->counter_value(counter_), 0u);
  network_->lines().back().under_way[FaultyNetwork::kThere] = last;
  until([&] { return ended_at_a(id); });
  EXPECT_TRUE(a_.worker->wait(id).ok());
  EXPECT_EQ(b_.worker->counter_value(counter_), 1u);
  EXPECT_EQ(lost(), 0u);
}

// What comes back, to a read: changed, it is asked for again.
TEST_P(Tamper, AChangedAnswerIsNoticed) {
  const size_t data = net::kSealBytes + framed::kHeaderBytes;
  std::vector<size_t> places = {3, 20, data - 1};
  if (protected_payload()) places.insert(places.end(), {data, data + kTamperedBytes + 3});
  for (const size_t at : places) {
    const size_t lost_before = lost();
    hold(FaultyNetwork::kBack, true);
    const TransferId id = submit(0, Op::kRead);
    std::string& bytes = network_->lines().back().under_way[FaultyNetwork::kBack];
    until([&] { return bytes.size() >= data + kTamperedBytes + data; });
    bytes[at] = static_cast<char>(bytes[at] ^ 1);
    hold(FaultyNetwork::kBack, false);
    until([&] { return ended_at_a(id); });
    EXPECT_TRUE(a_.worker->wait(id).ok());
    EXPECT_GT(lost(), lost_before) << at;
    EXPECT_EQ(0, std::memcmp(a_.memory.data(), b_.memory.data(), kTamperedBytes)) << at;
    until([&] { return a_.worker->peer_state(a_.peer) == PeerState::kUp; });
    run_out();
  }
}

// Promise(security): With `tcp.encrypt` neither payload nor region keys can be read | AES-256-GCM
//   over headers and payload
TEST_P(Tamper, EncryptedNothingIsThereToRead) {
  hold(FaultyNetwork::kThere, true);
  submit(0);
  std::string& bytes = network_->lines().back().under_way[FaultyNetwork::kThere];
  until([&] { return bytes.size() >= frame_bytes(); });
  const bool hidden = std::string(GetParam()) == "tcp.encrypt";
  const std::string payload(a_.memory.data() + 100, 32);
  EXPECT_EQ(bytes.find(payload) == std::string::npos, hidden);
  const uint64_t key = b_.remote.key;
  const std::string region_key(reinterpret_cast<const char*>(&key), sizeof key);
  EXPECT_EQ(bytes.find(region_key) == std::string::npos, hidden);
  EXPECT_EQ(a_.worker->explain(a_.peer).find("encrypted") != std::string::npos, hidden);
  hold(FaultyNetwork::kThere, false);
}

INSTANTIATE_TEST_SUITE_P(Protection, Tamper, testing::Values("", "tcp.integrity", "tcp.encrypt"),
                         [](const auto& of) {
                           const std::string name = of.param;
                           return name.empty() ? "plain" : name.substr(4);
                         });

}  // namespace
}  // namespace baton::tcp
