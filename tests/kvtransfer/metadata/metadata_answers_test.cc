// What servers of metadata answer that are broken, or a stranger's: each answer is understood or
// refused, and no worker ends of it.
#include <httplib.h>

#include "absl/strings/escaping.h"
#include "absl/strings/str_join.h"
#include "kvtransfer/metadata/etcd_store.h"
#include "tests/fails_with.h"
#include "tests/test.h"
#include "tests/until.h"

namespace baton::kvtransfer {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Answers each question with what the test says, and counts it.
class StrangeEtcd {
 public:
  struct Answer {
    int status;
    std::string body;
  };
  StrangeEtcd() {
    server_.set_tcp_nodelay(true);
    server_.Post("/v3/(.*)", [this](const httplib::Request& request, httplib::Response& response) {
      std::lock_guard lock(mutex_);
      const std::string what = request.matches[1];
      asked_.push_back(what);
      std::deque<Answer>& answers = answers_[what];
      const Answer answer = answers.empty() ? Answer{500, "no such question"} : answers.front();
      if (answers.size() > 1) answers.pop_front();
      response.status = answer.status;
      response.set_content(answer.body, "application/json");
    });
    port_ = server_.bind_to_any_port("127.0.0.1");
    thread_ = std::thread([this] { server_.listen_after_bind(); });
    until([&] { return server_.is_running(); });
  }
  ~StrangeEtcd() {
    server_.stop();
    thread_.join();
  }
  EtcdStore::Endpoints::value_type endpoint() const { return {"127.0.0.1", std::to_string(port_)}; }
  // In turn; the last one again and again.
  void answer(const std::string& what, std::deque<Answer> answers) {
    std::lock_guard lock(mutex_);
    answers_[what] = std::move(answers);
  }
  void answer(const std::string& what, const std::string& body) { answer(what, {{200, body}}); }
  std::vector<std::string> take_asked() {
    std::lock_guard lock(mutex_);
    return std::exchange(asked_, {});
  }

 private:
  httplib::Server server_;
  int port_ = 0;
  std::thread thread_;
  std::mutex mutex_;
  std::map<std::string, std::deque<Answer>> answers_;
  std::vector<std::string> asked_;
};

struct EtcdAnswers : ::testing::Test {
  StrangeEtcd etcd;
  EtcdStore store{{etcd.endpoint()}, "/agents", std::chrono::seconds(10)};
  void grant() { etcd.answer("lease/grant", R"({"ID":"7"})"); }
};

TEST_F(EtcdAnswers, WithoutALeaseNothingIsPut) {
  for (const char* answer :
       {"", "etcd", "7", "[]", "\"text\"", "null", "{}", R"({"result":7})", R"({"result":[]})",
        R"({"ID":7})", R"({"ID":""})", R"({"kvs":{}})", R"({"succeeded":"perhaps"})"}) {
    etcd.answer("lease/grant", answer);
    const absl::Status put = store.put("key", "bytes");
    EXPECT_TRUE(absl::IsUnavailable(put)) << answer << ": " << put;
    EXPECT_THAT(std::string(put.message()), HasSubstr("etcd 3.4's JSON"));
  }
  for (const std::string& what : etcd.take_asked()) EXPECT_EQ(what, "lease/grant");
  EXPECT_TRUE(absl::IsNotFound(store.renew()));
  EXPECT_EQ(store.remove("key"), absl::OkStatus());
  EXPECT_THAT(etcd.take_asked(), ElementsAre()) << "there is no lease that it could know";
}

TEST_F(EtcdAnswers, WhatIsPutIsThereOrTheReasonIsSaid) {
  grant();
  for (const char* answer : {"", "etcd", "7", "[]", "\"text\"", "null"}) {
    etcd.answer("kv/txn", answer);
    EXPECT_TRUE(absl::IsUnavailable(store.put("key", "bytes"))) << answer;
  }
  etcd.take_asked();
  for (const char* answer : {"{}", R"({"succeeded":false})", R"({"succeeded":"perhaps"})",
                             R"({"succeeded":1})", R"({"succeeded":[true]})"}) {
    etcd.answer("kv/txn", answer);
    EXPECT_TRUE(absl::IsAlreadyExists(store.put("key", "bytes"))) << answer;
    EXPECT_THAT(etcd.take_asked(), ElementsAre("kv/txn", "kv/txn"));
  }
  // The key is ours already.
  etcd.answer("kv/txn", {{200, "{}"}, {200, R"({"succeeded":true})"}});
  EXPECT_EQ(store.put("key", "bytes"), absl::OkStatus());
  EXPECT_THAT(etcd.take_asked(), ElementsAre("kv/txn", "kv/txn"));
  EXPECT_EQ(store.put("key", "bytes"), absl::OkStatus());
  EXPECT_THAT(etcd.take_asked(), ElementsAre("kv/txn")) << "one lease for all, and once is enough";
}

TEST_F(EtcdAnswers, ALeaseThatIsNotKnownIsAskedForAgain) {
  grant();
  etcd.answer("kv/txn", {{404, "etcdserver: requested lease not found"}});
  EXPECT_TRUE(absl::IsNotFound(store.put("key", "bytes")));
  etcd.answer("kv/txn", R"({"succeeded":true})");
  EXPECT_EQ(store.put("key", "bytes"), absl::OkStatus());
  EXPECT_THAT(etcd.take_asked(), ElementsAre("lease/grant", "kv/txn", "lease/grant", "kv/txn"));
  // Not so because of an answer that says nothing of leases.
  for (const StrangeEtcd::Answer& answer :
       std::vector<StrangeEtcd::Answer>{{404, "no such page"}, {500, "lease not found"}}) {
    etcd.answer("kv/txn", {answer});
    EXPECT_THAT(store.put("key", "bytes"), fails_with(Code::kUnavailable, {answer.body}));
  }
  EXPECT_THAT(etcd.take_asked(), ElementsAre("kv/txn", "kv/txn"));
  etcd.answer("kv/txn", {{500, std::string(100'000, 'x')}});
  EXPECT_LT(store.put("key", "bytes").message().size(), 300U);
}

TEST_F(EtcdAnswers, ALeaseIsRenewedOrRanOut) {
  grant();
  etcd.answer("kv/txn", R"({"succeeded":true})");
  for (const char* answer :
       {"", "7", "[]", "{}", R"({"result":7})", R"({"result":[]})", R"({"result":{}})",
        R"({"result":{"TTL":9}})", R"({"result":{"TTL":""}})", R"({"result":{"TTL":"0"}})"}) {
    ASSERT_EQ(store.put("key", "bytes"), absl::OkStatus());
    etcd.answer("lease/keepalive", answer);
    EXPECT_TRUE(absl::IsNotFound(store.renew())) << answer;
    etcd.take_asked();
    EXPECT_TRUE(absl::IsNotFound(store.renew()));
    EXPECT_THAT(etcd.take_asked(), ElementsAre()) << "it has none any more";
  }
  ASSERT_EQ(store.put("key", "bytes"), absl::OkStatus());
  etcd.answer("lease/keepalive", R"({"result":{"TTL":"9"}})");
  EXPECT_EQ(store.renew(), absl::OkStatus());
  etcd.answer("lease/keepalive", {{500, "busy"}});
  EXPECT_TRUE(absl::IsUnavailable(store.renew()));
  etcd.answer("lease/keepalive", R"({"result":{"TTL":"9"}})");
  EXPECT_EQ(store.renew(), absl::OkStatus()) << "who was busy may know the lease yet";
}

TEST_F(EtcdAnswers, WhatIsReadIsAValueOrRefused) {
  for (const char* answer :
       {"", "etcd", "7", "[]", "\"text\"", "null", R"({"kvs":[{"value":"no base64!"}]})"}) {
    etcd.answer("kv/range", answer);
    EXPECT_TRUE(absl::IsUnavailable(store.get("key").status())) << answer;
  }
  for (const char* answer : {"{}", R"({"kvs":[]})", R"({"kvs":{}})", R"({"kvs":"text"})"}) {
    etcd.answer("kv/range", answer);
    EXPECT_TRUE(absl::IsNotFound(store.get("key").status())) << answer;
  }
  for (const char* answer : {R"({"kvs":[{}]})", R"({"kvs":[7]})", R"({"kvs":[{"value":7}]})"}) {
    etcd.answer("kv/range", answer);  // etcd leaves a value of no bytes out
    EXPECT_EQ(store.get("key").value_or("none"), "") << answer;
  }
  etcd.answer("kv/range", R"({"kvs":[{"value":"Ynl0ZXM="}]})");
  EXPECT_EQ(store.get("key").value_or("none"), "bytes");
}

// Whoever answers is asked from then on.
TEST(EtcdEndpoints, TheNextIsAskedWhereOneFails) {
  StrangeEtcd bad, good;
  EtcdStore store({bad.endpoint(), good.endpoint()}, "/agents", std::chrono::seconds(10));
  bad.answer("kv/range", {{503, "no leader"}});
  good.answer("kv/range", R"({"kvs":[{"value":"Ynl0ZXM="}]})");
  EXPECT_EQ(store.get("key").value_or("none"), "bytes");
  EXPECT_EQ(store.get("key").value_or("none"), "bytes");
  EXPECT_EQ(bad.take_asked().size(), 1U);
  EXPECT_EQ(good.take_asked().size(), 2U);
  good.answer("kv/range", {{503, "no leader"}});
  EXPECT_TRUE(absl::IsUnavailable(store.get("key").status()));
  EXPECT_EQ(bad.take_asked().size(), 1U);
  EXPECT_EQ(good.take_asked().size(), 1U);
  store.stop();
  EXPECT_TRUE(absl::IsCancelled(store.get("key").status()));
  EXPECT_THAT(bad.take_asked(), ElementsAre());
}

// Each answer in turn is one watch's; a watch that ends is begun again.
TEST_F(EtcdAnswers, AWatchSaysWhatChangedAndNothingElse) {
  const auto event = [](const std::string& key) {
    return R"({"result":{"events":[{"kv":{"key":")" + absl::Base64Escape(key) + R"("}}]}})";
  };
  const auto watch = [](const std::vector<std::string>& lines) {
    return StrangeEtcd::Answer{200, absl::StrJoin(lines, "\n") + "\n"};
  };
  const std::string never = event("/agents/never");
  const std::string odd_events = R"({"result":{"events":[7,{},{"kv":7},{"kv":{}},{"kv":{"key":7}},)"
                                 R"({"kv":{"key":"no base64!"}}]}})";
  etcd.answer("watch",
              {watch({R"({"result":{"created":true}})", event("/agents/one"), "no JSON", never}),
               watch({R"({"result":{"created":"perhaps"}})", event("/agents/two"),
                      R"({"result":{"canceled":true}})", never}),
               watch({event("/agents/three"), "7", never}),
               watch({event("short"), R"({"error":"busy"})", never}),
               watch({odd_events, R"({"result":{"events":7,"canceled":"perhaps"}})",
                      event("/agents/four"), R"({"result":7})", never}),
               watch({event("/agents/last")}),
               {500, ""}});
  std::mutex mutex;
  std::condition_variable came;
  std::vector<std::string> keys;
  store.watch([&](std::string_view key) {
    const std::lock_guard lock(mutex);
    keys.emplace_back(key);
    came.notify_all();
  });
  std::unique_lock lock(mutex);
  came.wait(lock, [&] { return !keys.empty() && keys.back() == "last"; });
  EXPECT_THAT(keys, ElementsAre("", "one", "two", "three", "", "", "", "four", "last"));
  lock.unlock();
  store.stop();
}

}  // namespace
}  // namespace baton::kvtransfer
