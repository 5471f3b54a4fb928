// What the keeper's thread asks a store and tells its agent, call by call; and what happens while
// it asks.
#include "kvtransfer/metadata/metadata_keeper.h"

#include "tests/test.h"
#include "tests/until.h"

namespace baton::kvtransfer {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;

constexpr milliseconds kNoRenewal = std::chrono::hours(24);
constexpr milliseconds kShort{300};

// What the store answers, and all that was said, in order.
struct Script {
  std::mutex mutex;
  std::vector<std::string> said;
  std::map<std::string, absl::StatusOr<std::string>> there;
  std::deque<absl::Status> renewals, puts;  // in turn; then OK
  absl::Status removal;
  std::map<std::string, std::function<void()>> meanwhile;  // once, before the answer to that
  std::atomic<bool> watching{false};
  MetadataStore::Changed changed;

  void say(const std::string& what) {
    std::function<void()> hook;
    {
      const std::lock_guard lock(mutex);
      said.push_back(what);
      if (const auto at = meanwhile.find(what); at != meanwhile.end()) {
        hook = std::move(at->second);
        meanwhile.erase(at);
      }
    }
    if (hook) hook();
  }
  void before_answering(const std::string& what, std::function<void()> hook) {
    const std::lock_guard lock(mutex);
    meanwhile[what] = std::move(hook);
  }
  void put_there(const std::string& key, absl::StatusOr<std::string> bytes) {
    const std::lock_guard lock(mutex);
    there.insert_or_assign(key, std::move(bytes));
  }
  absl::Status next(std::deque<absl::Status>& of) {
    const std::lock_guard lock(mutex);
    if (of.empty()) return absl::OkStatus();
    absl::Status out = of.front();
    of.pop_front();
    return out;
  }
  // Waits until it was said so often.
  void wait(const std::string& what, int times = 1) {
    until([&] { return count(what) >= times; });
  }
  int count(const std::string& what) {
    const std::lock_guard lock(mutex);
    return static_cast<int>(std::count(said.begin(), said.end(), what));
  }
  std::vector<std::string> all(const std::vector<std::string>& but = {}) {
    const std::lock_guard lock(mutex);
    std::vector<std::string> out;
    for (const std::string& one : said) {
      if (std::none_of(but.begin(), but.end(),
                       [&](const std::string& word) { return one.starts_with(word); })) {
        out.push_back(one);
      }
    }
    return out;
  }
};

class ScriptedStore : public MetadataStore {
 public:
  explicit ScriptedStore(Script& script) : script_(script) {}
  absl::Status put(const std::string& key, std::string_view bytes) override {
    script_.say(absl::StrCat("put ", key, "=", std::string(bytes)));
    return script_.next(script_.puts);
  }
  absl::Status remove(const std::string& key) override {
    script_.say("remove " + key);
    return script_.removal;
  }
  absl::Status renew() override {
    script_.say("renew");
    return script_.next(script_.renewals);
  }
  absl::StatusOr<std::string> get(const std::string& key) override {
    absl::StatusOr<std::string> out = absl::NotFoundError("nothing");
    {
      const std::lock_guard lock(script_.mutex);
      if (const auto at = script_.there.find(key); at != script_.there.end()) out = at->second;
    }
    script_.say("get " + key);
    return out;
  }
  bool watch(Changed changed) override {
    script_.changed = std::move(changed);
    return true;
  }
  bool watching() const override { return script_.watching; }
  void stop() override {}
  std::string name() const override { return "a script"; }

 private:
  Script& script_;
};

struct Keeper : ::testing::Test {
  void make(milliseconds lease) {
    keeper = std::make_unique<MetadataKeeper>(
        std::make_unique<ScriptedStore>(script), lease,
        MetadataKeeper::Events{
            [this](std::string_view agent, const std::string& bytes) {
              script.say(absl::StrCat("found ", std::string(agent), "=", bytes));
              return script.next(found);
            },
            [this](std::string_view agent) { script.say("gone " + std::string(agent)); }});
  }
  // While the store is asked `what`, the keeper ends.
  void end_during(const std::string& what) {
    script.before_answering(what, [this] {
      std::atomic<pid_t> ending{0};
      ends = std::thread([&ending, this] {
        ending = gettid();
        keeper = nullptr;
      });
      until([&] { return ending != 0 && sleeps(ending); });
      script.say("it is to end");
    });
  }
  void wait_for_end() {
    script.wait("it is to end");
    ends.join();
  }
  // Nothing of what was asked before waits any more.
  void settle() {
    keeper->publish("z", "", std::to_string(++settled));
    script.wait(absl::StrCat("put z=", settled));
  }
  Script script;
  std::deque<absl::Status> found;  // what the agent makes of it, in turn; then OK
  std::unique_ptr<MetadataKeeper> keeper;
  std::thread ends;
  int settled = 0;
};

TEST_F(Keeper, WhatIsWantedWhileTheStoreIsAskedIsDoneNext) {
  make(kNoRenewal);
  script.before_answering("put a=1", [&] { keeper->publish("a", "", "2"); });
  keeper->publish("a", "", "1");
  script.wait("put a=2");
  script.before_answering("put a.part=3", [&] { keeper->withdraw("a", "farewell"); });
  keeper->publish("a", "part", "3");
  script.wait("put a=farewell");
  EXPECT_THAT(script.all(),
              ElementsAre("put a=1", "put a=2", "put a.part=3", "remove a.part", "put a=farewell"));
  keeper = nullptr;
}

// Its thread may be in the midst of several.
TEST_F(Keeper, EndsBetweenTwoThatArePut) {
  make(kNoRenewal);
  script.removal = absl::UnavailableError("it is dead");
  script.before_answering("put 0=", [&] {
    keeper->publish("a", "", "");
    keeper->publish("b", "", "");
  });
  end_during("put a=");
  keeper->publish("0", "", "");
  wait_for_end();
  EXPECT_THAT(script.all({"it"}), ElementsAre("put 0=", "put a=", "remove 0")) << "nobody answers";
}

TEST_F(Keeper, EndsBetweenTwoThatAreLookedFor) {
  make(kNoRenewal);
  script.watching = true;
  script.before_answering("get 0", [&] {
    keeper->follow("a", "");
    keeper->follow("b", "");
  });
  end_during("get a");
  keeper->follow("0", "");
  wait_for_end();
  EXPECT_THAT(script.all({"it"}), ElementsAre("get 0", "get a"));
}

TEST_F(Keeper, WhatTheLeaseLostIsPutAgain) {
  const absl::Status unavailable = absl::UnavailableError("busy"),
                     taken = absl::AlreadyExistsError("another's");
  script.renewals = {absl::OkStatus(), absl::NotFoundError("it ran out"), unavailable,
                     absl::OkStatus(), absl::NotFoundError("it ran out"), unavailable};
  script.puts = {absl::OkStatus(), absl::OkStatus(), absl::OkStatus(), taken, taken};
  std::vector<absl::StatusCode> states;
  const auto note = [&] { states.push_back(keeper->state("a").code()); };
  make(kShort);
  script.before_answering("put a=1", [&] {
    note();
    script.before_answering("put a=1", [&] {
      note();
      script.before_answering("put a=1", [&] {
        note();
        script.before_answering("put a=1", [&] {
          note();
          script.before_answering("put a=1", note);
        });
      });
    });
  });
  keeper->publish("a", "", "1");
  script.wait("renew", 8);
  EXPECT_EQ(keeper->state("a"), absl::OkStatus());
  keeper = nullptr;
  std::vector<std::string> said = script.all();
  said.resize(14);
  EXPECT_THAT(said,
              ElementsAre("put a=1", "renew", "renew", "put a=1", "renew", "put a=1", "renew",
                          "renew", "put a=1", "renew", "put a=1", "renew", "put a=1", "renew"));
  using absl::StatusCode;
  EXPECT_THAT(states,
              ElementsAre(StatusCode::kUnavailable, StatusCode::kOk, StatusCode::kUnavailable,
                          StatusCode::kOk, StatusCode::kAlreadyExists));
}

TEST_F(Keeper, WhatCouldNotBePutIsPutWhenItsKeyChanges) {
  script.puts = {absl::AlreadyExistsError("another's"), absl::OkStatus()};
  make(kNoRenewal);
  keeper->publish("a", "", "1");
  script.wait("put a=1");
  settle();
  script.changed("b");
  script.changed("");
  settle();
  EXPECT_EQ(script.count("put a=1"), 1);
  script.changed("a");
  script.wait("put a=1", 2);
  settle();
  script.changed("a");
  settle();
  EXPECT_EQ(script.count("put a=1"), 2) << "it is there";
  keeper = nullptr;
}

TEST_F(Keeper, ThatAPartGoesSaysNothingWhereTheWholeIsFollowed) {
  make(kShort);
  script.put_there("a", "1");
  script.put_there("a.part", "2");
  found = {absl::OkStatus(), absl::NotFoundError("too early"), absl::OkStatus()};
  keeper->follow("a", "");
  script.wait("found a=1");
  keeper->follow("a", "part");
  script.wait("found a=2", 2);  // again, without a change
  script.put_there("a.part", absl::NotFoundError("nothing"));
  script.wait("get a.part", script.count("get a.part") + 3);
  EXPECT_EQ(script.count("gone a"), 0);
  keeper->forget("a");
  script.put_there("a.part", "2");
  keeper->follow("a", "part");
  script.wait("found a=2", 3);
  script.put_there("a.part", absl::NotFoundError("nothing"));
  script.wait("gone a");
  keeper = nullptr;
}

// Where a watch says what changes nothing is asked again, but for what could not be had.
TEST_F(Keeper, WhatIsWatchedIsLookedForWhenItChanges) {
  script.watching = true;
  make(kShort);
  script.put_there("a", "1");
  script.put_there("b", absl::UnavailableError("busy"));
  script.put_there("c.part", "2");
  found = {absl::OkStatus(), absl::NotFoundError("too early")};
  keeper->follow("a", "");
  script.wait("found a=1");
  keeper->follow("c", "part");
  script.wait("found c=2", 2);
  keeper->follow("b", "");
  script.wait("get b", 4);
  EXPECT_EQ(script.count("get a"), 1);
  script.put_there("b", "3");
  script.wait("found b=3");
  const int before = script.count("get b");
  script.changed("b");
  script.wait("get b", before + 1);
  EXPECT_EQ(script.count("get a"), 1);
  script.changed("");
  script.wait("get a", 2);
  // A change while it is read.
  script.before_answering("get a", [&] {
    script.put_there("a", "4");
    script.changed("a");
  });
  script.put_there("a", "3");
  script.changed("a");
  script.wait("found a=4");
  keeper = nullptr;
}

TEST_F(Keeper, AnswersGoOnlyToTheRequester) {
  script.watching = true;
  make(kNoRenewal);
  script.put_there("a", "old");
  script.before_answering("get a", [&] { keeper->forget("a"); });
  keeper->follow("a", "");
  script.wait("get a");
  settle();
  script.before_answering("get a", [&] {
    script.put_there("a", "new");
    keeper->forget("a");
    keeper->follow("a", "");
  });
  keeper->follow("a", "");
  script.wait("found a=new");
  settle();
  EXPECT_THAT(script.all({"get", "put"}), ElementsAre("found a=new"));
  EXPECT_EQ(keeper->state("a"), absl::OkStatus());
  keeper = nullptr;
}

TEST_F(Keeper, WhatWasLoadedAndForgottenMeanwhileGoes) {
  script.watching = true;
  make(kNoRenewal);
  script.put_there("a", "1");
  script.put_there("b", "2");
  script.put_there("c", "3");
  const auto settled_without_gone = [&] {
    settle();
    EXPECT_THAT(script.all({"get", "put", "found"}), ElementsAre());
  };
  // It was not taken.
  found = {absl::DataLossError("damaged")};
  script.before_answering("found b=2", [&] { keeper->forget("b"); });
  keeper->follow("b", "");
  script.wait("found b=2");
  settled_without_gone();
  // It is followed again.
  script.before_answering("found c=3", [&] {
    keeper->forget("c");
    keeper->follow("c", "");
  });
  keeper->follow("c", "");
  script.wait("found c=3", 2);
  settled_without_gone();
  script.before_answering("found a=1", [&] { keeper->forget("a"); });
  keeper->follow("a", "");
  script.wait("gone a");
  EXPECT_TRUE(absl::IsNotFound(keeper->state("a")));
  keeper = nullptr;
}

}  // namespace
}  // namespace baton::kvtransfer
