// Calls of an agent that ask for what there is not, or for what makes no sense: each is refused,
// and nothing is left of it. What depends on the route is in agent_test.cc.
#include "absl/strings/str_split.h"
#include "kvtransfer/agent.h"
#include "kvtransfer/metadata/agent_metadata.h"
#include "tests/fails_with.h"
#include "tests/kvtransfer/agent_pair.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"
#include "tests/usable_provider.h"
#include "transport/address.h"
#include "transport/base/unique_fd.h"

namespace baton::kvtransfer {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::Pair;

class AgentBadInput : public ::testing::Test {
 protected:
  AgentBadInput() {
    introduce(*a_, *b_);
    before_ = a_->stats();
  }
  void TearDown() override {
    EXPECT_EQ(a_->stats().registered, before_.registered);
    EXPECT_EQ(a_->stats().lists, before_.lists);
    EXPECT_EQ(a_->stats().transfers, before_.transfers);
  }
  std::unique_ptr<Agent> a_ = make_agent(agent_options("alpha", "tcp"));
  std::unique_ptr<Agent> b_ = make_agent(agent_options("beta", "tcp"));
  AgentMemory mine_{*a_, 1 << 16, 3}, theirs_{*b_, 1 << 16, 5};
  AgentStats before_;
};

// An address that was asked for is listened on, or there is no agent: one that serves by other ways
// would look well, and be reached by nobody.
TEST(AgentListener, WhatCannotBeListenedOnIsAnErrorAtTheStart) {
  AgentOptions listening = agent_options("listening");
  const std::unique_ptr<Agent> other = make_agent(std::move(listening));
  ASSERT_NE(other->port(), 0);
  struct Row {
    const char* host;
    uint16_t port;
    const char* advertise;
    absl::StatusCode code;
    const char* said;
  };
  const Row rows[] = {
      {"10.99.99.99", 0, "", absl::StatusCode::kInvalidArgument, "10.99.99.99"},
      {"nosuch.invalid", 0, "", absl::StatusCode::kNotFound, "nosuch.invalid"},
      {"0.0.0.0:7000", 0, "", absl::StatusCode::kInvalidArgument, "host alone"},
      {"", other->port(), "", absl::StatusCode::kAlreadyExists, "another process has this port"},
      {"*", other->port(), "", absl::StatusCode::kAlreadyExists, "another process has this port"},
      {"*", 0, "nosuch.invalid:7000", absl::StatusCode::kNotFound, "advertise"},
      {"*", 0, "10.0.0.1:port", absl::StatusCode::kNotFound, "advertise"},
  };
  for (const Row& row : rows) {
    for (const char* providers : {"", "tcp", "shm,tcp"}) {
      SCOPED_TRACE(absl::StrCat(row.host, ":", row.port, " ", row.advertise, " by ", providers));
      AgentOptions options = agent_options("c");
      if (*providers != 0) options.worker.providers = absl::StrSplit(providers, ',');
      options.worker.listen_host = row.host;
      options.worker.listen_port = row.port;
      options.worker.advertise = row.advertise;
      const absl::Status status = Agent::create(std::move(options)).status();
      EXPECT_EQ(status.code(), row.code) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(row.said));
    }
  }
}

TEST(AgentListener, TellsOthersWhatItIsToldToTell) {
  AgentOptions options = agent_options("c");
  options.worker.listen_host = "*";
  options.worker.advertise = "203.0.113.5:9000";
  const std::unique_ptr<Agent> agent = make_agent(std::move(options));
  const auto told = must(Address::decode(agent->address()));
  EXPECT_THAT(told.providers, Contains(Pair("tcp", "203.0.113.5:9000")));
  EXPECT_NE(agent->port(), 9000) << "what it listens on";
}

// A library that can end its process is in it when somebody has asked for it.
TEST(AgentProviders, SomeAreThereOnRequestAlone) {
  const auto names = [](AgentOptions options) {
    std::vector<std::string> out;
    const std::unique_ptr<Agent> agent = make_agent(std::move(options));
    if (agent == nullptr) return out;
    const absl::StatusOr<Address> address = Address::decode(agent->address());
    for (const auto& [name, where] : address->providers) {
      out.push_back(name);
    }
    return out;
  };
  EXPECT_THAT(names(agent_options("c")), AllOf(Contains("tcp"), Not(Contains("ucx"))));
  if (!check_provider("ucx").ok()) GTEST_SKIP() << "this program is without ucx";
  if (const std::string why = why_unusable("ucx"); !why.empty()) GTEST_SKIP() << why;
  EXPECT_THAT(names(agent_options("c", "ucx")), Contains("ucx"));
  AgentOptions by_setting = agent_options("c");
  by_setting.worker.settings = {{"ucx.slice_kib", "512"}};
  EXPECT_THAT(names(std::move(by_setting)), AllOf(Contains("tcp"), Contains("ucx")));
  AgentOptions listed = agent_options("c");
  listed.worker.providers = {"tcp", "ucx"};
  EXPECT_THAT(names(std::move(listed)), ElementsAre("tcp", "ucx"));
}

TEST_F(AgentBadInput, KindsOfMemoryThatAnAgentDoesNotMove) {
  introduce(*a_, *b_);
  for (const MemoryKind kind : {MemoryKind::kBlock, MemoryKind::kObject}) {
    EXPECT_TRUE(absl::IsUnimplemented(a_->register_memory({mine_.whole()}, kind)));
    EXPECT_TRUE(absl::IsUnimplemented(a_->deregister_memory({mine_.whole()}, kind)));
    EXPECT_TRUE(absl::IsUnimplemented(a_->partial_metadata({mine_.whole()}, true, kind).status()));
    EXPECT_TRUE(absl::IsUnimplemented(a_->prepare_local({{mine_.whole()}}, kind).status()));
    EXPECT_TRUE(
        absl::IsUnimplemented(a_->prepare_remote("beta", {{theirs_.whole()}}, kind).status()));
    EXPECT_TRUE(
        absl::IsUnimplemented(a_->register_rows({{mine_.address(), 8, 0, 8, 8}}, kind).status()));
    EXPECT_FALSE(a_->has_remote("beta", {theirs_.whole()}, kind));
  }
  EXPECT_THAT(a_->register_memory({mine_.whole()}, MemoryKind::kObject).message(),
              HasSubstr("OBJ memory"));
  const absl::Status vram = a_->register_memory({mine_.whole()}, MemoryKind::kVram);
  EXPECT_TRUE(absl::IsUnimplemented(vram) || absl::IsInvalidArgument(vram)) << vram;
  EXPECT_EQ(absl::IsInvalidArgument(vram), memory_supported(MemoryKind::kVram).ok());
  EXPECT_TRUE(absl::IsNotFound(a_->deregister_memory({mine_.whole()}, MemoryKind::kVram)));
  const auto none = static_cast<MemoryKind>(77);
  EXPECT_TRUE(absl::IsInvalidArgument(a_->register_memory({mine_.whole()}, none)));
  EXPECT_TRUE(absl::IsInvalidArgument(a_->deregister_memory({mine_.whole()}, none)));
  EXPECT_TRUE(a_->has_remote("beta", {theirs_.whole()}));
  EXPECT_TRUE(absl::IsUnimplemented(
      a_->prepare_remote("beta", {{theirs_.whole()}}, MemoryKind::kFile).status()));
  EXPECT_FALSE(a_->has_remote("beta", {theirs_.whole()}, MemoryKind::kFile));
}

// Files cannot be the local side: what was registered for it is given back.
TEST_F(AgentBadInput, RowsThatCannotBeListedAreNotRegistered) {
  const TemporaryFolder folder;
  const base::UniqueFd file(
      ::open(folder.path("file").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  const auto fd = static_cast<uint64_t>(file.get());
  EXPECT_TRUE(
      absl::IsUnimplemented(a_->register_rows({{0, 8, fd, 8, 8}}, MemoryKind::kFile).status()));
  const uint64_t at = mine_.address();
  for (const StridedDescriptor& bad : {StridedDescriptor{at, 8, 0, 8, 0},
                                       {at, 8, 0, 0, 0},
                                       {at, 8, 0, UINT64_MAX / 2, 4},
                                       {at, 16, 0, UINT64_MAX - 7, 2}}) {
    const absl::Status status = a_->register_rows({bad}).status();
    EXPECT_THAT(status, fails_with(Code::kInvalidArgument, {"is not a range of memory"}));
  }
  EXPECT_TRUE(absl::IsNotFound(a_->register_rows({{at, 8, 0, 4, 8}}).status())) << "they overlap";
  const absl::Status nowhere = a_->register_rows({{16, 8, 0, 8, 8}}).status();
  EXPECT_THAT(nowhere, fails_with(Code::kInvalidArgument, {"range 0 of 1"}));
}

TEST_F(AgentBadInput, RangesAreRegisteredAllOrNothing) {
  const Descriptor bad{16, 4096, 0};
  for (const auto& list : {std::vector{mine_.whole(), bad},
                           {bad, mine_.whole()},
                           {mine_.whole(), bad, mine_.whole()}}) {
    EXPECT_TRUE(absl::IsInvalidArgument(a_->register_memory(list)));
    EXPECT_EQ(a_->stats().registered, before_.registered);
    EXPECT_TRUE(absl::IsNotFound(a_->deregister_memory(list)));
    EXPECT_EQ(a_->stats().registered, before_.registered);
  }
  EXPECT_TRUE(absl::IsInvalidArgument(a_->register_memory({{0, 0, 0}})));
  // Twice the same, and once back: the other one still stands.
  ASSERT_TRUE(a_->register_memory({mine_.whole()}).ok());
  ASSERT_TRUE(a_->deregister_memory({mine_.whole()}).ok());
  const auto list = a_->prepare_local(mine_.pages(8, 8));
  EXPECT_TRUE(list.ok() && a_->release_list(*list).ok()) << list.status();
}

TEST_F(AgentBadInput, MappedMemoryIsWithinItsFileAndBeginsWithAPage) {
  const base::UniqueFd file(
      static_cast<int>(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING)));
  ASSERT_EQ(ftruncate(file.get(), 16384), 0);
  void* const memory = mmap(nullptr, 16384, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  const auto address = reinterpret_cast<uint64_t>(memory);
  const auto refused = [&](uint64_t bytes, int fd, uint64_t offset) {
    const absl::Status status = a_->register_mapped({address, bytes, 0}, fd, offset);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(refused(4096, file.get(), 0), HasSubstr("F_SEAL_SHRINK"));
  ASSERT_EQ(fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
  EXPECT_THAT(refused(4096, -1, 0), HasSubstr("not a memfd"));
  const TemporaryFolder folder;
  const base::UniqueFd plain(
      ::open(folder.path("file").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  ASSERT_EQ(ftruncate(plain.get(), 16384), 0);
  EXPECT_THAT(refused(4096, plain.get(), 0), HasSubstr("not a memfd"));
  EXPECT_THAT(refused(4096, file.get(), 1 << 20), HasSubstr("outside a file of 16384"));
  EXPECT_THAT(refused(4096, file.get(), UINT64_MAX & ~uint64_t{4095}), HasSubstr("outside a file"));
  EXPECT_THAT(refused(8192, file.get(), 12288), HasSubstr("outside a file"));
  EXPECT_THAT(refused(UINT64_MAX, file.get(), 4096), HasSubstr("outside a file"));
  EXPECT_THAT(refused(4096, file.get(), 8), HasSubstr("begin at a page"));
  munmap(memory, 16384);
}

TEST_F(AgentBadInput, UnknownPeer) {
  EXPECT_TRUE(absl::IsNotFound(a_->connect("nobody")));
  EXPECT_THAT(a_->explain("nobody"), HasSubstr("load its metadata"));
  EXPECT_EQ(a_->explain("beta"), "beta: not called yet");
  EXPECT_TRUE(absl::IsNotFound(a_->notify("nobody", "x")));
  EXPECT_FALSE(a_->has_remote("absent"));
  EXPECT_TRUE(absl::IsNotFound(a_->prepare_remote("nobody", {{theirs_.whole()}}).status()));
  for (const char* where : {"", "nowhere", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:99999", ":1"}) {
    EXPECT_FALSE(a_->fetch_metadata("beta", where).ok()) << where;
    EXPECT_FALSE(a_->send_metadata(where).ok()) << where;
    EXPECT_FALSE(a_->invalidate_metadata(where).ok()) << where;
  }
  a_->remove_remote("alpha");  // oneself is not forgotten
  EXPECT_TRUE(a_->has_remote("alpha"));
  EXPECT_TRUE(a_->has_remote("alpha", {mine_.whole()}));
}

// A member of the cluster that says where it is wrongly.
TEST_F(AgentBadInput, MalformedAddress) {
  AgentMetadata odd;
  odd.name = "odd";
  odd.uid = WorkerUid::random();
  odd.address = "nowhere at all";
  odd.ranges.push_back(
      {{4096, 100, 0}, {.owner = odd.uid, .key = 1, .size = 100, .generation = 1}});
  must(a_->add_remote(odd.encode(*agent_options("any").worker.key)));
  EXPECT_FALSE(a_->connect("odd").ok());
  EXPECT_FALSE(a_->notify("odd", "x").ok());
  const auto read =
      must(a_->make_transfer(Op::kRead, {{{mine_.address(), 100, 0}}}, {{{4096, 100, 0}}}, "odd"));
  EXPECT_FALSE(a_->post(read).ok());
  EXPECT_EQ(*a_->state(read), AgentTransferState::kIdle);
  EXPECT_TRUE(a_->release(read).ok());
  a_->remove_remote("odd");
}

TEST_F(AgentBadInput, DirectTransfersOfWhatIsNotThere) {
  introduce(*a_, *b_);
  const auto made = [&](const Descriptor& here, const Descriptor& there, const char* agent) {
    return a_->make_transfer(Op::kWrite, {{here}}, {{there}}, agent).status();
  };
  EXPECT_TRUE(absl::IsNotFound(made({16, 8, 0}, theirs_.whole(), "beta")));
  EXPECT_TRUE(absl::IsNotFound(made(mine_.whole(), {16, 8, 0}, "beta")));
  EXPECT_TRUE(absl::IsNotFound(made(mine_.whole(), theirs_.whole(), "nobody")));
  EXPECT_TRUE(absl::IsInvalidArgument(made({mine_.address(), 8, 0}, theirs_.whole(), "beta")));
  EXPECT_TRUE(absl::IsInvalidArgument(a_->make_transfer(Op::kWrite, {}, {}, "beta").status()));
  const auto here = a_->prepare_local({mine_.whole()});
  const auto there = a_->prepare_remote("beta", {theirs_.whole()});
  for (int number : {2, 7, 128, 255}) {
    const auto op = static_cast<Op>(number);
    EXPECT_TRUE(absl::IsInvalidArgument(a_->make_transfer(op, *here, {0}, *there, {0}).status()));
    EXPECT_TRUE(absl::IsInvalidArgument(
        a_->make_transfer(op, {mine_.whole()}, {theirs_.whole()}, "beta").status()));
  }
  for (const AgentListId list : {*here, *there}) EXPECT_TRUE(a_->release_list(list).ok());
}

TEST_F(AgentBadInput, MessagesThatAreTooLong) {
  introduce(*a_, *b_);
  const std::string most(kMaxAgentMessage, 'x'), more = most + "x";
  const std::vector<Descriptor> here{mine_.whole()}, there{theirs_.whole()};
  EXPECT_TRUE(
      absl::IsInvalidArgument(a_->make_transfer(Op::kWrite, here, there, "beta", more).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(a_->notify("beta", more)));
  const auto write = must(a_->make_transfer(Op::kWrite, here, there, "beta", most));
  const std::string_view message = more;
  EXPECT_TRUE(absl::IsInvalidArgument(a_->post(write, &message)));
  EXPECT_EQ(*a_->state(write), AgentTransferState::kIdle);
  EXPECT_TRUE(a_->release(write).ok());
  EXPECT_TRUE(
      absl::IsInvalidArgument(a_->send_metadata("127.0.0.1:" + std::to_string(b_->port()), more)));
}

TEST_F(AgentBadInput, OptionsThatMakeNoAgent) {
  for (const std::string& name : {std::string(), std::string(kMaxAgentName + 1, 'n')}) {
    auto worker = must(Worker::create(agent_options("worker", "tcp").worker));
    EXPECT_TRUE(absl::IsInvalidArgument(
        Agent::create(std::move(worker), agent_options(name, "tcp")).status()));
    EXPECT_TRUE(absl::IsInvalidArgument(Agent::create(agent_options(name, "tcp")).status()));
  }
  EXPECT_NE(make_agent(agent_options(std::string(kMaxAgentName, 'n'), "tcp")), nullptr);
  AgentOptions options = agent_options("gamma", "tcp");
  options.metadata_store = "gopher://127.0.0.1";
  EXPECT_TRUE(absl::IsInvalidArgument(Agent::create(options).status()));
  options = agent_options("gamma", "tcp");
  options.worker.require = "tpc";
  EXPECT_THAT(Agent::create(options).status().message(), HasSubstr("did you mean tcp?"));
  const char* const key_file = std::getenv("BATON_KEY_FILE");
  const std::string before = key_file != nullptr ? key_file : "";
  setenv("BATON_KEY_FILE", "/nowhere/at.all", 1);
  options = agent_options("gamma", "tcp");
  auto worker = must(Worker::create(options.worker));
  options.worker.key = std::nullopt;
  EXPECT_FALSE(Agent::create(std::move(worker), options).ok());
  EXPECT_FALSE(Agent::create(options).ok());
  key_file != nullptr ? setenv("BATON_KEY_FILE", before.c_str(), 1) : unsetenv("BATON_KEY_FILE");
  EXPECT_TRUE(absl::IsFailedPrecondition(a_->publish_metadata()));
  EXPECT_TRUE(absl::IsFailedPrecondition(a_->follow_metadata("beta")));
  EXPECT_TRUE(absl::IsFailedPrecondition(a_->withdraw_metadata()));
  EXPECT_TRUE(absl::IsFailedPrecondition(a_->metadata_state("beta")));
}

}  // namespace
}  // namespace baton::kvtransfer
