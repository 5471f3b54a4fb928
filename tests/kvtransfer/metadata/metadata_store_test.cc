// Metadata left in a folder, at an HTTP server and in a real etcd: who may have a name, what is
// believed, and what becomes of it when agents and servers die.
#include "kvtransfer/metadata/metadata_store.h"

#include "kvtransfer/metadata/agent_metadata.h"
#include "kvtransfer/metadata/file_store.h"
#include "tests/fails_with.h"
#include "tests/kvtransfer/agent_pair.h"
#include "tests/kvtransfer/metadata/metadata_servers.h"
#include "tests/peer_process.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"
#include "transport/base/child.h"

namespace baton::kvtransfer {
namespace {

using ::testing::HasSubstr;
const Time kLong = until_gives_up();
// Longer than any test: what is refused while a lease lives must not depend on how busy this
// machine is.
constexpr std::chrono::seconds kLongLease{600};
constexpr std::chrono::seconds kShortLease{1};

class MetadataStoreTest : public ::testing::TestWithParam<std::string> {
 protected:
  // One server for all tests of a kind; each test has names of its own.
  static std::map<std::string, std::unique_ptr<MetadataServer>>& servers() {
    static std::map<std::string, std::unique_ptr<MetadataServer>> all;
    return all;
  }
  void SetUp() override {
    std::string why;
    if (servers().count(GetParam()) == 0) {
      servers()[GetParam()] = make_metadata_server(GetParam(), why);
    }
    server_ = servers()[GetParam()].get();
    if (server_ == nullptr) GTEST_SKIP() << why;
  }
  static void TearDownTestSuite() { servers().clear(); }

  std::string named(const std::string& name) const {
    return name + "/" + ::testing::UnitTest::GetInstance()->current_test_info()->name();
  }
  std::unique_ptr<MetadataStore> store(Time lease = kLongLease) const {
    return *make_metadata_store(server_->url(),
                                std::chrono::duration_cast<std::chrono::milliseconds>(lease));
  }
  AgentOptions options(const std::string& name, Time lease = kLongLease) const {
    AgentOptions out = agent_options(named(name));
    out.metadata_store = server_->url();
    out.metadata_lease = lease;
    return out;
  }
  static bool published(const Agent& agent) { return agent.metadata_state(agent.name()).ok(); }

  MetadataServer* server_ = nullptr;
};

class MetadataServerTest : public MetadataStoreTest {};

TEST_P(MetadataStoreTest, AKeyIsWhoseItWasFirst) {
  const auto mine = store(), theirs = store();
  const std::string key = metadata_key(named("key"));
  EXPECT_TRUE(absl::IsNotFound(theirs->get(key).status()));
  ASSERT_EQ(mine->put(key, std::string("one\0two", 7)), absl::OkStatus());
  EXPECT_EQ(*theirs->get(key), std::string("one\0two", 7));
  EXPECT_TRUE(absl::IsAlreadyExists(theirs->put(key, "three")));
  ASSERT_EQ(mine->put(key, ""), absl::OkStatus());
  EXPECT_EQ(*theirs->get(key), "");
  EXPECT_EQ(mine->renew(), absl::OkStatus());
  EXPECT_EQ(theirs->remove(key), absl::OkStatus());  // it has nothing there
  EXPECT_EQ(*mine->get(key), "");
  EXPECT_EQ(mine->remove(key), absl::OkStatus());
  EXPECT_TRUE(absl::IsNotFound(theirs->get(key).status()));
  EXPECT_EQ(theirs->put(key, "three"), absl::OkStatus());
  EXPECT_EQ(*mine->get(key), "three");
  EXPECT_EQ(theirs->remove(key), absl::OkStatus());
}

TEST_P(MetadataStoreTest, FoundByNameFollowedAndTakenBack) {
  const auto a = make_agent(options("alpha")), b = make_agent(options("beta"));
  AgentMemory mine(*a, 4096, 1), theirs(*b, 4096, 2);
  ASSERT_EQ(a->follow_metadata(b->name()), absl::OkStatus());
  until([&] { return absl::IsNotFound(a->metadata_state(b->name())); });
  ASSERT_EQ(b->publish_metadata(), absl::OkStatus());
  until([&] { return a->has_remote(b->name(), {theirs.whole()}); });
  until([&] { return a->metadata_state(b->name()).ok() && published(*b); });
  const auto read = a->make_transfer(Op::kRead, {mine.whole()}, {theirs.whole()}, b->name());
  ASSERT_EQ(a->post(*read), absl::OkStatus());
  ASSERT_EQ(a->wait(*read, kLong), absl::OkStatus());
  EXPECT_EQ(mine.bytes, theirs.bytes);

  AgentMemory later(*b, 4096, 3);
  ASSERT_EQ(b->publish_metadata(*b->partial_metadata({later.whole()}, false), "later"),
            absl::OkStatus());
  ASSERT_EQ(a->follow_metadata(b->name(), "later"), absl::OkStatus());
  until([&] { return a->has_remote(b->name(), {theirs.whole(), later.whole()}); });

  // While the two are connected.
  ASSERT_EQ(b->withdraw_metadata(), absl::OkStatus());
  until([&] { return !a->has_remote(b->name()); });
  until([&] { return absl::IsFailedPrecondition(a->metadata_state(b->name())); });
  ASSERT_EQ(b->publish_metadata(), absl::OkStatus());
  until([&] { return a->has_remote(b->name(), {later.whole()}); });
}

TEST_P(MetadataStoreTest, AnAgentThatEndsLeavesNothing) {
  auto a = make_agent(options("alpha"));
  ASSERT_EQ(a->publish_metadata(), absl::OkStatus());
  until([&] { return published(*a); });
  const std::string key = metadata_key(a->name());
  EXPECT_TRUE(store()->get(key).ok());
  const auto b = make_agent(options("beta"));
  ASSERT_EQ(b->follow_metadata(a->name()), absl::OkStatus());
  until([&] { return b->has_remote(named("alpha")); });
  a = nullptr;
  EXPECT_TRUE(absl::IsNotFound(store()->get(key).status()));
}

// Promise(agents): Of two agents with one name the later is refused while the first lives | etcd
//   leases, file locks, renewed lines
TEST_P(MetadataStoreTest, TheLaterOfTwoWithOneNameIsRefused) {
  auto first = make_agent(options("alpha"));
  AgentMemory memory(*first, 4096, 1);
  ASSERT_EQ(first->publish_metadata(), absl::OkStatus());
  until([&] { return published(*first); });
  const auto second = make_agent(options("alpha", kShortLease));
  ASSERT_EQ(second->publish_metadata(), absl::OkStatus());
  until([&] { return absl::IsAlreadyExists(second->metadata_state(second->name())); });
  const auto b = make_agent(options("beta"));
  ASSERT_EQ(b->follow_metadata(first->name()), absl::OkStatus());
  until([&] { return b->has_remote(named("alpha"), {memory.whole()}); });
  first = nullptr;
  until([&] { return published(*second); });
}

// Run by the next test in a process of its own: an agent that others find, until it is killed.
TEST(MetadataStore, DISABLED_Publisher) {
  AgentOptions options = agent_options(std::getenv("METADATA_TEST_NAME"));
  options.metadata_store = std::getenv("METADATA_TEST_URL");
  options.metadata_lease = kShortLease;
  const auto agent = make_agent(std::move(options));
  ASSERT_EQ(agent->publish_metadata(), absl::OkStatus());
  pause();
}

TEST_P(MetadataStoreTest, ANameIsFreeWhenItsAgentWasKilled) {
  const std::string name = named("alpha"), url = server_->url();
  setenv("METADATA_TEST_NAME", name.c_str(), 1);
  setenv("METADATA_TEST_URL", url.c_str(), 1);
  PeerProcess publisher("/proc/self/exe", {"--gtest_also_run_disabled_tests",
                                           "--gtest_filter=MetadataStore.DISABLED_Publisher"});
  const auto b = make_agent(options("beta", kShortLease));
  ASSERT_EQ(b->follow_metadata(name), absl::OkStatus());
  until([&] { return b->has_remote(name); });
  publisher.kill_it();
  until([&] { return !b->has_remote(name); });
  until([&] { return absl::IsNotFound(b->metadata_state(name)); });

  const auto next = make_agent(options("alpha", kShortLease));
  AgentMemory memory(*next, 4096, 1);
  ASSERT_EQ(next->publish_metadata(), absl::OkStatus());
  until([&] { return b->has_remote(name, {memory.whole()}); });
}

// Promise(agents): A name found in etcd, HTTP or a folder is that agent's own metadata, or refused
//   | the name is signed with the metadata
TEST_P(MetadataStoreTest, WhatIsDamagedForeignOrAnothersIsRefusedByName) {
  const auto b = make_agent(options("beta"));
  const auto strange = store();
  const auto refused = [&](const std::string& bytes, const std::string& why) {
    const std::string name = named("alpha");
    ASSERT_EQ(strange->put(metadata_key(name), bytes), absl::OkStatus());
    ASSERT_EQ(b->follow_metadata(name), absl::OkStatus());
    until([&] { return absl::IsDataLoss(b->metadata_state(name)); });
    EXPECT_THAT(std::string(b->metadata_state(name).message()), HasSubstr(why));
    EXPECT_FALSE(b->has_remote(name));
    b->remove_remote(name);
  };
  AgentOptions foreign = agent_options(named("alpha"));
  foreign.worker.key = *ClusterKey::from_bytes("the key of another cluster altogether");
  refused(*make_agent(std::move(foreign))->metadata(), "another cluster key");
  const auto eve = make_agent(agent_options("eve"));
  refused(*eve->metadata(), "the metadata of \"eve\"");
  const auto good = make_agent(agent_options(named("alpha")));
  std::string bytes = *good->metadata();
  bytes[bytes.size() / 2] ^= 1;
  refused(bytes, "damaged");
  refused("hello", "not agent metadata");
  refused(good->metadata()->substr(0, 100), "damaged");

  // And the good one is taken at once, though bad ones were there before it.
  ASSERT_EQ(strange->put(metadata_key(named("alpha")), *good->metadata()), absl::OkStatus());
  ASSERT_EQ(b->follow_metadata(named("alpha")), absl::OkStatus());
  until([&] { return b->has_remote(named("alpha")); });
}

TEST_P(MetadataServerTest, AServerThatDiesAndComesBackIsFoundAgain) {
  const auto a = make_agent(options("alpha", kShortLease));
  const auto b = make_agent(options("beta", kShortLease));
  ASSERT_EQ(a->publish_metadata(), absl::OkStatus());
  ASSERT_EQ(b->follow_metadata(a->name()), absl::OkStatus());
  until([&] { return published(*a) && b->has_remote(a->name()); });
  server_->kill();
  until([&] { return absl::IsUnavailable(a->metadata_state(a->name())); });
  ASSERT_EQ(b->publish_metadata(), absl::OkStatus());
  ASSERT_EQ(a->follow_metadata(b->name()), absl::OkStatus());
  until([&] { return absl::IsUnavailable(a->metadata_state(b->name())); });
  server_->start();
  until([&] { return published(*a) && published(*b) && a->has_remote(b->name()); });
}

// A forked child has all that its parent had open, but the parent's locks.
TEST(MetadataStore, ANameIsFreeWhenItsOwnerIsDeadThoughItsChildLives) {
  const TemporaryFolder folder;
  const std::string key = "key";
  const auto store = [&] { return std::make_unique<FileStore>(folder.path()); };
  int ready[2], end[2];
  ASSERT_EQ(pipe2(ready, O_CLOEXEC), 0);
  ASSERT_EQ(pipe2(end, O_CLOEXEC), 0);
  char byte = 0;
  const pid_t owner = base::fork_child();
  if (owner == 0) {
    close(end[1]);
    const auto its = store();
    if (!its->put(key, "the owner's").ok()) _exit(1);
    if (fork() == 0) {
      if (write(ready[1], "r", 1) != 1) _exit(1);
      _exit(read(end[0], &byte, 1) == 0 ? 0 : 1);  // until the test is over
    }
    while (true) pause();
  }
  close(ready[1]);
  close(end[0]);
  EXPECT_EQ(read(ready[0], &byte, 1), 1);
  EXPECT_TRUE(absl::IsAlreadyExists(store()->put(key, "another's")));
  kill(owner, SIGKILL);
  waitpid(owner, nullptr, 0);
  const auto heir = store();
  EXPECT_TRUE(absl::IsNotFound(heir->get(key).status()));
  EXPECT_EQ(heir->put(key, "another's"), absl::OkStatus());
  EXPECT_EQ(*store()->get(key), "another's");
  close(ready[0]);
  close(end[1]);
}

std::string kind_of(const ::testing::TestParamInfo<std::string>& one) { return one.param; }
INSTANTIATE_TEST_SUITE_P(Stores, MetadataStoreTest, ::testing::Values(METADATA_STORES), kind_of);
INSTANTIATE_TEST_SUITE_P(Servers, MetadataServerTest, ::testing::Values(METADATA_SERVER), kind_of);

TEST(MetadataStore, UrlsAreChecked) {
  const auto made = [](const std::string& url, int lease = 10'000) {
    return make_metadata_store(url, std::chrono::milliseconds(lease)).status();
  };
  for (const char* good :
       {"etcd://a", "etcd://a:1,b:2/c/d/", "http://[::1]:80/x", "http://a", "file:///tmp/"}) {
    EXPECT_EQ(made(good), absl::OkStatus()) << good;
  }
  for (const char* bad : {"", "etcd", "etcd://", "etcd://:1", "http://a:0", "http://a:99999",
                          "http://a,b", "https://a", "file://a", "file://", "ftp://a"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(made(bad))) << bad;
  }
  EXPECT_TRUE(absl::IsInvalidArgument(made("etcd://a", 10)));
  EXPECT_TRUE(absl::IsInvalidArgument(made("etcd://a", 24 * 3'600'000 + 1)));
  EXPECT_TRUE(absl::IsInvalidArgument(made("http://a:port")));
}

TEST(MetadataStore, KeysAreNamesWithoutSurprises) {
  EXPECT_EQ(metadata_key("decode-0"), "decode-0");
  EXPECT_EQ(metadata_key("../a b"), "=2E=2E=2Fa=20b");
  EXPECT_NE(metadata_key("a.b"), metadata_key("a", "b"));
}

// Nobody would ever hear of an agent that publishes into a folder that is not there.
TEST(MetadataStore, AFolderThatCannotBeUsedIsRefusedAtOnce) {
  const TemporaryFolder folder;
  const auto opened = [](const std::string& path) {
    AgentOptions options = agent_options("alpha");
    options.metadata_store = "file://" + path;
    return Agent::create(std::move(options)).status();
  };
  EXPECT_THAT(opened(folder.path("missing")),
              fails_with(Code::kNotFound, {"/missing\": there is no such folder"}));
  std::ofstream(folder.path("file")) << "no folder";
  const absl::Status file = opened(folder.path("file"));
  EXPECT_THAT(file, fails_with(Code::kFailedPrecondition, {"it is not a folder"}));
  ASSERT_EQ(chmod(folder.path("file").c_str(), 0700), 0);  // which may be run
  EXPECT_TRUE(absl::IsFailedPrecondition(opened(folder.path("file"))));
  EXPECT_THAT(opened(folder.path("file/folder")),
              fails_with(Code::kFailedPrecondition, {"Not a directory"}));
  EXPECT_TRUE(opened(folder.path()).ok());
  if (geteuid() == 0) return;  // who may write everywhere
  ASSERT_EQ(chmod(folder.path().c_str(), 0500), 0);
  EXPECT_TRUE(absl::IsFailedPrecondition(opened(folder.path()))) << opened(folder.path());
  ASSERT_EQ(chmod(folder.path().c_str(), 0700), 0);
}

TEST(MetadataStore, WithdrawnMetadataLeavesNoFile) {
  const TemporaryFolder folder;
  FileStore store(folder.path());
  ASSERT_TRUE(store.put("alpha", "metadata").ok());
  EXPECT_FALSE(std::filesystem::is_empty(folder.path()));
  EXPECT_TRUE(store.remove("alpha").ok());
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

// Whoever may write the folder can put links and pipes there, in the place of every file.
// Promise(agents): Links and pipes in a store's folder harm no file outside and block nothing |
//   only plain files of the folder are opened
TEST(MetadataStore, LinksLeadNowhereAndPipesAreNotWaitedFor) {
  const TemporaryFolder folder;
  const TemporaryFolder elsewhere;
  const std::string victim = elsewhere.path("victim");
  const auto precious = [&] {
    std::string text;
    std::getline(std::ifstream(victim), text);
    return text;
  };
  for (const std::string suffix : {".agent", ".agent.new", ".lock"}) {
    for (const bool link : {true, false}) {
      const std::string name = (link ? "link" : "pipe") + suffix;
      SCOPED_TRACE(name);
      std::ofstream(victim) << "precious";
      const std::string path = folder.path(name + suffix);
      ASSERT_EQ(link ? symlink(victim.c_str(), path.c_str()) : mkfifo(path.c_str(), 0600), 0);
      FileStore store(folder.path());
      const absl::Status put = store.put(name, "metadata");
      EXPECT_EQ(put.ok(), suffix != ".lock") << put;
      EXPECT_EQ(precious(), "precious");
      if (!put.ok()) continue;
      EXPECT_EQ(FileStore(folder.path()).get(name).value_or("none"), "metadata");
      // In the place of what is there to be read.
      const std::string file = folder.path(name + ".agent");
      ASSERT_EQ(unlink(file.c_str()), 0);
      ASSERT_EQ(link ? symlink(victim.c_str(), file.c_str()) : mkfifo(file.c_str(), 0600), 0);
      EXPECT_TRUE(absl::IsUnavailable(FileStore(folder.path()).get(name).status()));
    }
  }
}

// Whoever may write the folder takes them away, one by one, or puts others there.
TEST(MetadataStore, FilesThatAStrangerTookOrMade) {
  const TemporaryFolder folder;
  const std::string file = folder.path("key.agent"), lock = folder.path("key.lock");
  FileStore ours(folder.path()), theirs(folder.path());
  ASSERT_EQ(ours.put("key", "ours"), absl::OkStatus());
  ASSERT_EQ(unlink(file.c_str()), 0);
  EXPECT_TRUE(absl::IsNotFound(ours.renew()));
  EXPECT_TRUE(absl::IsNotFound(theirs.get("key").status()));
  ASSERT_EQ(ours.put("key", "ours"), absl::OkStatus());
  EXPECT_EQ(ours.renew(), absl::OkStatus());
  ASSERT_EQ(unlink(lock.c_str()), 0);
  std::ofstream(lock) << "";  // another file of that name, which nobody has locked
  EXPECT_TRUE(absl::IsNotFound(ours.renew()));
  EXPECT_TRUE(absl::IsNotFound(theirs.get("key").status()));
  ASSERT_EQ(ours.put("key", "again"), absl::OkStatus());
  EXPECT_EQ(theirs.get("key").value_or("none"), "again");
  EXPECT_TRUE(absl::IsAlreadyExists(theirs.put("key", "theirs")));
  ASSERT_EQ(truncate(file.c_str(), (16 << 20) + 1), 0);
  EXPECT_TRUE(absl::IsDataLoss(theirs.get("key").status()));
  ASSERT_EQ(mkdir(folder.path("folder.agent.new").c_str(), 0700), 0);
  EXPECT_FALSE(ours.put("folder", "ours").ok());
}

TEST(MetadataStore, OnlyOnesOwnMetadataIsPublished) {
  std::optional<TemporaryFolder> folder(std::in_place);
  const std::string path = folder->path();
  AgentOptions options = agent_options("alpha");
  options.metadata_store = "file://" + path;
  const auto a = make_agent(std::move(options));
  folder.reset();  // it goes while the agent lives
  const auto b = make_agent(agent_options("beta"));
  EXPECT_TRUE(absl::IsInvalidArgument(a->publish_metadata(*b->metadata())));
  EXPECT_TRUE(absl::IsInvalidArgument(a->follow_metadata("alpha")));
  EXPECT_TRUE(absl::IsInvalidArgument(a->follow_metadata("")));
  EXPECT_TRUE(absl::IsInvalidArgument(a->follow_metadata(std::string(kMaxAgentName + 1, 'n'))));
  EXPECT_TRUE(absl::IsDataLoss(a->publish_metadata("garbage")));
  ASSERT_EQ(a->publish_metadata(), absl::OkStatus());
  until([&] { return a->metadata_state("alpha").message().find(path) != std::string::npos; });
  EXPECT_TRUE(absl::IsUnavailable(a->metadata_state("alpha")));
}

}  // namespace
}  // namespace baton::kvtransfer
