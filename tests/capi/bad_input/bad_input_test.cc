// What a program in C may get wrong beside its arguments (capi_test: HandlesThatAreOld...,
// NonsenseIs...), and what may happen to its peer: a result, a text that says what, and never a
// crash, a hang or a wrong byte. Over shm and over tcp.
#include <baton/baton.h>

#include "absl/strings/escaping.h"
#include "tests/peer_process.h"
#include "tests/sanitized.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"
#include "tests/until.h"

namespace {

using baton::until;
using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr int64_t kLong = 60'000'000'000;
constexpr uint64_t kPage = 4096, kPages = 256;

struct Memory {
  Memory()
      : data(static_cast<uint8_t*>(mmap(nullptr, kPage * kPages, PROT_READ | PROT_WRITE,
                                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {}
  ~Memory() { unmap(); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  void unmap() {
    if (data != nullptr) munmap(data, kPage * kPages);
    data = nullptr;
  }
  void fill(uint8_t byte) const { std::memset(data, byte, kPage * kPages); }
  bool is(uint8_t byte) const {
    return std::all_of(data, data + kPage * kPages, [byte](uint8_t each) { return each == byte; });
  }
  uint8_t* data;
  const uint64_t address = reinterpret_cast<uint64_t>(data);
  const baton_descriptor whole = {address, kPage* kPages, 0};
  const baton_strided pages = {address, kPage, 0, kPage, kPages};
};

class BadInputInC : public ::testing::TestWithParam<const char*> {
 public:
  void SetUp() override { a = make("a"); }
  void TearDown() override {
    for (baton_agent* agent : agents) baton_agent_destroy(agent);
  }
  baton_agent* make(const char* name, const char* key_file = nullptr) {
    baton_agent_options options;
    baton_agent_options_init(&options, sizeof options);
    options.name = name;
    options.require = GetParam();
    options.key_file = key_file;
    baton_agent* out = nullptr;
    EXPECT_EQ(baton_agent_create(&options, &out, &error), BATON_OK) << error.text;
    agents.push_back(out);
    return out;
  }
  void own(baton_agent* agent, const Memory& memory) {
    ASSERT_EQ(baton_agent_register(agent, BATON_DRAM, &memory.whole, 1, &error), BATON_OK)
        << error.text;
  }
  std::string metadata(baton_agent* agent) {
    baton_bytes bytes{};
    EXPECT_EQ(baton_agent_metadata(agent, &bytes, &error), BATON_OK) << error.text;
    std::string out(bytes.data, bytes.size);
    baton_bytes_free(&bytes);
    return out;
  }
  int32_t add(const std::string& bytes) {
    return baton_agent_add_remote(a, bytes.data(), bytes.size(), nullptr, &error);
  }
  // Of all pages here and there, or of those that are named.
  baton_list prepare(const char* agent, const baton_strided& pages) {
    baton_list out = 0;
    EXPECT_EQ(baton_list_prepare_strided(a, agent, BATON_DRAM, &pages, 1, &out, &error), BATON_OK)
        << error.text;
    return out;
  }
  baton_transfer make(int32_t op, baton_list local, baton_list remote, const char* message = "") {
    std::array<int64_t, kPages> all{};
    std::iota(all.begin(), all.end(), 0);
    baton_transfer out = 0;
    EXPECT_EQ(baton_transfer_make(a, op, local, all.data(), kPages, remote, all.data(), kPages,
                                  message, strlen(message), &out, &error),
              BATON_OK)
        << error.text;
    return out;
  }
  int32_t run(baton_transfer transfer) {
    const int32_t posted = baton_transfer_post(a, transfer, nullptr, 0, &error);
    return posted < 0 ? posted : baton_transfer_wait(a, transfer, kLong, &error);
  }

  baton_agent* a = nullptr;
  std::vector<baton_agent*> agents;
  baton_error error = BATON_ERROR_INIT;
};

TEST_P(BadInputInC, MemoryThatIsGivenBackUnderAList) {
  const Memory mine, theirs;
  baton_agent* const b = make("b");
  own(a, mine);
  own(b, theirs);
  ASSERT_EQ(add(metadata(b)), BATON_OK);
  const baton_list local = prepare(nullptr, mine.pages), remote = prepare("b", theirs.pages);
  const baton_transfer write = make(BATON_WRITE, local, remote),
                       read = make(BATON_READ, local, remote);
  mine.fill(1);
  ASSERT_EQ(run(write), BATON_OK) << error.text;
  mine.fill(2);
  ASSERT_EQ(baton_agent_deregister(b, BATON_DRAM, &theirs.whole, 1, &error), BATON_OK);
  for (const baton_transfer transfer : {write, read}) {
    EXPECT_LT(run(transfer), 0);
    EXPECT_GT(strlen(error.text), 20u);
  }
  ASSERT_EQ(baton_agent_deregister(a, BATON_DRAM, &mine.whole, 1, &error), BATON_OK);
  EXPECT_LT(run(write), 0);
  EXPECT_EQ(baton_agent_deregister(a, BATON_DRAM, &mine.whole, 1, &error), BATON_ERR_NOT_FOUND);
  baton_list none = 0;
  EXPECT_EQ(baton_list_prepare_strided(a, nullptr, BATON_DRAM, &mine.pages, 1, &none, &error),
            BATON_ERR_NOT_FOUND);
  EXPECT_TRUE(mine.is(2) && theirs.is(1));
}

TEST_P(BadInputInC, MemoryThatIsUnmappedUnderAList) {
  if (baton::kSanitized) GTEST_SKIP() << "a sanitizer ends the program where memory is gone";
  for (const bool here : {true, false}) {
    for (const int32_t op : {BATON_WRITE, BATON_READ}) {
      Memory mine, theirs;
      const std::string name = std::to_string(here) + std::to_string(op);
      baton_agent* const b = make(name.c_str());
      own(a, mine);
      own(b, theirs);
      ASSERT_EQ(add(metadata(b)), BATON_OK);
      const baton_transfer move =
          make(op, prepare(nullptr, mine.pages), prepare(name.c_str(), theirs.pages));
      ASSERT_EQ(run(move), BATON_OK) << error.text;
      (here ? mine : theirs).unmap();
      EXPECT_THAT(run(move), AnyOf(BATON_ERR_BACKEND, BATON_ERR_NOT_ALLOWED)) << error.text;
      EXPECT_THAT(error.text, HasSubstr("mapped"));
      EXPECT_EQ(baton_transfer_release(a, move, kLong, &error), BATON_OK) << error.text;
      EXPECT_EQ(baton_agent_deregister(a, BATON_DRAM, &mine.whole, 1, &error), BATON_OK);
      EXPECT_EQ(baton_agent_deregister(b, BATON_DRAM, &theirs.whole, 1, &error), BATON_OK);
    }
  }
}

TEST_P(BadInputInC, MetadataOfAnotherVersionKeyOrName) {
  const std::string good = metadata(make("b"));
  std::string newer = good;
  ++newer[8];
  EXPECT_EQ(add(newer), BATON_ERR_MISMATCH);
  EXPECT_THAT(error.text, HasSubstr("version"));
  for (size_t at = 0; at < good.size(); ++at) {
    std::string damaged = good;
    damaged[at] = static_cast<char>(damaged[at] ^ 1);
    EXPECT_EQ(add(damaged), BATON_ERR_MISMATCH) << at;
    EXPECT_EQ(add(good.substr(0, at)), BATON_ERR_MISMATCH) << at;
  }
  const baton::TemporaryFolder folder;
  const std::string key_file = folder.path("another.key");
  FILE* const file = fopen(key_file.c_str(), "w");
  ASSERT_NE(file, nullptr);
  fchmod(fileno(file), 0600);
  for (int i = 0; i < 32; ++i) fputs("ab", file);
  fclose(file);
  EXPECT_EQ(add(metadata(make("stranger", key_file.c_str()))), BATON_ERR_MISMATCH);
  EXPECT_THAT(error.text, HasSubstr("another cluster key"));
  EXPECT_EQ(add(metadata(make("a"))), BATON_ERR_INVALID_PARAM);
  EXPECT_THAT(error.text, HasSubstr("different names"));
  EXPECT_EQ(add(metadata(a)), BATON_ERR_INVALID_PARAM);
  for (const char* name : {"b", "stranger"}) {
    EXPECT_EQ(baton_agent_has_remote(a, name, BATON_DRAM, nullptr, 0), 0);
    EXPECT_EQ(baton_notify(a, name, "x", 1, &error), BATON_ERR_NOT_FOUND);
  }
}

// Whoever has the name of one that is known takes its place, and what was prepared for that is
// stale.
TEST_P(BadInputInC, AnAgentThatTakesAnothersName) {
  const Memory mine, theirs, others;
  baton_agent* const first = make("b");
  baton_agent* const second = make("b");
  own(a, mine);
  own(first, theirs);
  own(second, others);
  mine.fill(5);
  ASSERT_EQ(add(metadata(first)), BATON_OK);
  const baton_list local = prepare(nullptr, mine.pages), remote = prepare("b", theirs.pages);
  const baton_transfer write = make(BATON_WRITE, local, remote);
  ASSERT_EQ(add(metadata(second)), BATON_OK);
  EXPECT_EQ(run(write), BATON_ERR_NOT_FOUND);
  EXPECT_THAT(error.text, HasSubstr("another agent has its name"));
  const int64_t index = 0;
  baton_transfer none = 0;
  EXPECT_EQ(baton_transfer_make(a, BATON_WRITE, local, &index, 1, remote, &index, 1, nullptr, 0,
                                &none, &error),
            BATON_ERR_NOT_FOUND);
  ASSERT_EQ(run(make(BATON_WRITE, local, prepare("b", others.pages))), BATON_OK) << error.text;
  EXPECT_TRUE(theirs.is(0) && others.is(5));
}

TEST_P(BadInputInC, TenMillionDescriptors) {
  const auto many = static_cast<uint64_t>(baton::rounds_of(10'000'000, 200'000));
  const Memory mine, theirs;
  baton_agent* const b = make("b");
  own(a, mine);
  own(b, theirs);
  ASSERT_EQ(add(metadata(b)), BATON_OK);
  mine.fill(1);
  std::vector<baton_descriptor> rows(many);
  uint64_t at = 1;
  for (baton_descriptor& row : rows) {
    at = (at * 1'103'515'245 + 12'345) % (kPage * kPages);  // no two steps alike
    row = {mine.address + at, 1, 0};
  }
  baton_list local = 0;
  ASSERT_EQ(baton_list_prepare(a, nullptr, BATON_DRAM, rows.data(), many, &local, &error), BATON_OK)
      << error.text;
  const baton_strided far = {theirs.address, 1, 0, 1, kPage * kPages};
  const baton_list remote = prepare("b", far);
  std::vector<int64_t> here(many), there(many);
  std::iota(here.begin(), here.end(), 0);
  for (size_t i = 0; i < many; ++i) there[i] = static_cast<int64_t>(i % (kPage * kPages));
  baton_transfer write = 0;
  ASSERT_EQ(baton_transfer_make(a, BATON_WRITE, local, here.data(), many, remote, there.data(),
                                many, nullptr, 0, &write, &error),
            BATON_OK)
      << error.text;
  EXPECT_EQ(run(write), BATON_OK) << error.text;
  EXPECT_EQ(static_cast<uint64_t>(std::count(theirs.data, theirs.data + kPage * kPages, 1)),
            std::min(many, kPage * kPages));
  here.back() = static_cast<int64_t>(many);
  EXPECT_EQ(baton_transfer_make(a, BATON_WRITE, local, here.data(), many, remote, there.data(),
                                many, nullptr, 0, &write, &error),
            BATON_ERR_INVALID_PARAM);
  EXPECT_THAT(error.text, HasSubstr(absl::StrCat("local index ", many - 1, " is ", many)));
  rows.back().address = 8;
  EXPECT_EQ(baton_list_prepare(a, nullptr, BATON_DRAM, rows.data(), many, &local, &error),
            BATON_ERR_NOT_FOUND);
  EXPECT_THAT(error.text, HasSubstr(absl::StrCat("descriptor ", many - 1)));
}

// Each of four threads has its pages, and all of them one agent.
TEST_P(BadInputInC, AnyThreadMayCall) {
  const Memory mine, theirs;
  baton_agent* const b = make("b");
  own(a, mine);
  own(b, theirs);
  ASSERT_EQ(add(metadata(b)), BATON_OK);
  mine.fill(3);
  const baton_list local = prepare(nullptr, mine.pages), remote = prepare("b", theirs.pages);
  std::vector<std::thread> threads;
  for (int64_t first = 0; first < 256; first += 64) {
    threads.emplace_back([&, first] {
      baton_error its = BATON_ERROR_INIT;
      for (int64_t page = first; page < first + 64; ++page) {
        baton_transfer write = 0;
        EXPECT_EQ(baton_transfer_make(a, BATON_WRITE, local, &page, 1, remote, &page, 1, nullptr, 0,
                                      &write, &its),
                  BATON_OK);
        EXPECT_EQ(baton_transfer_run(a, write, kLong, &its), BATON_OK) << its.text;
        EXPECT_EQ(baton_transfer_post(a, write, nullptr, 0, &its), BATON_ERR_NOT_FOUND);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(theirs.is(3));
}

// The peer is a process that dies.
class DeathInC : public BadInputInC {
 public:
  void SetUp() override {
    BadInputInC::SetUp();
    own(a, mine);
    const std::string told = absl::HexStringToBytes(peer.line());
    ASSERT_EQ(add(told), BATON_OK) << error.text;
    const baton_strided far = {strtoull(peer.line().c_str(), nullptr, 10), kPage, 0, kPage, kPages};
    local = prepare(nullptr, mine.pages);
    remote = prepare("b", far);
    mine.fill(7);
  }
  Memory mine;
  baton::PeerProcess peer{AGENT_PEER, GetParam()};
  baton_list local = 0, remote = 0;
};

TEST_P(DeathInC, BeforeTheFirstPost) {
  const baton_transfer read = make(BATON_READ, local, remote);
  peer.kill_it();
  EXPECT_EQ(run(read), BATON_ERR_REMOTE_DISCONNECT) << error.text;
  EXPECT_GT(strlen(error.text), 20u);
  EXPECT_TRUE(mine.is(7));
  EXPECT_EQ(baton_transfer_release(a, read, kLong, &error), BATON_OK) << error.text;
}

TEST_P(DeathInC, BetweenTwoPosts) {
  const baton_transfer read = make(BATON_READ, local, remote);
  ASSERT_EQ(run(read), BATON_OK) << error.text;
  for (size_t page = 0; page < kPages; ++page) EXPECT_EQ(mine.data[page * kPage + 9], page);
  peer.kill_it();
  mine.fill(7);
  int32_t end = BATON_OK;
  // Over shm its pages are there until it is missed.
  until([&] { return (end = run(read)) != BATON_OK; });
  EXPECT_EQ(end, BATON_ERR_REMOTE_DISCONNECT) << error.text;
  for (size_t page = 0; page < kPages; ++page) {  // as it was, or as it was there
    const uint8_t* const first = mine.data + page * kPage;
    EXPECT_TRUE(std::all_of(first, first + kPage, [&](uint8_t byte) { return byte == *first; }));
  }
  EXPECT_EQ(baton_agent_has_remote(a, "b", BATON_DRAM, nullptr, 0), 0);
}

TEST_P(DeathInC, InFlightAndBeforeTheMessage) {
  const baton_transfer moves[] = {make(BATON_READ, local, remote, "read"),
                                  make(BATON_WRITE, local, remote, "written")};
  ASSERT_EQ(run(moves[0]), BATON_OK) << error.text;
  peer.stop();
  for (const baton_transfer move : moves) {
    ASSERT_GE(baton_transfer_post(a, move, nullptr, 0, &error), 0) << error.text;
  }
  peer.kill_it();
  for (const baton_transfer move : moves) {
    const int32_t end = baton_transfer_wait(a, move, kLong, &error);
    // Over shm nobody is needed at the other side.
    if (end != BATON_OK || GetParam() != std::string("shm")) {
      EXPECT_EQ(end, BATON_ERR_REMOTE_DISCONNECT) << error.text;
    }
    EXPECT_THAT(baton_transfer_release(a, move, kLong, &error),
                AnyOf(BATON_OK, BATON_ERR_REMOTE_DISCONNECT))
        << error.text;
  }
  mine.fill(9);  // fenced: nothing comes any more
  until([&] { return baton_agent_has_remote(a, "b", BATON_DRAM, nullptr, 0) == 0; });
  EXPECT_TRUE(mine.is(9));
  baton_agent_stats stats{};
  stats.size = sizeof stats;
  ASSERT_EQ(baton_agent_get_stats(a, &stats, &error), BATON_OK);
  EXPECT_EQ(stats.running + stats.transfers, 0u);
}

INSTANTIATE_TEST_SUITE_P(Providers, BadInputInC, ::testing::Values("shm", "tcp"),
                         [](const auto& param) { return std::string(param.param); });
INSTANTIATE_TEST_SUITE_P(Providers, DeathInC, ::testing::Values("shm", "tcp"),
                         [](const auto& param) { return std::string(param.param); });

}  // namespace
