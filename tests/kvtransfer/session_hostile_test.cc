// A session's two ends, a good load between them, and an agent with the key that says to both what
// no session says. In virtual time; nothing moves but by turn().
#include <malloc.h>
#include <zlib.h>

#include "absl/strings/escaping.h"
#include "absl/strings/str_replace.h"
#include "tests/kvtransfer/session_sides.h"
#include "tests/manual_clock.h"
#include "tests/sanitized.h"
#include "tests/seeds.h"
#include "tests/until.h"

namespace baton::kvtransfer {
namespace {

constexpr Time kHour = std::chrono::hours(1);
constexpr Time kTenSeconds = std::chrono::seconds(10);  // for loads from the hostile agent

// What stands in the place of each field in turn. "@deep" becomes more brackets than are parsed.
const std::vector<json>& nasty() {
  static const std::vector<json> values = [] {
    auto out = json::parse(R"([null, true, "", "abc", "@deep", 0.5, 1e300, -1e300,
                               [], {}, [[0, 0, [[7, 7]]]]])")
                   .get<std::vector<json>>();
    for (const int64_t number :
         {int64_t{-1}, int64_t{0}, int64_t{513}, int64_t{UINT32_MAX}, INT64_MIN, INT64_MAX}) {
      out.emplace_back(number);
    }
    for (const uint64_t number : {uint64_t{1} << 60, UINT64_MAX}) out.emplace_back(number);
    out.push_back({uint64_t{1} << 60, uint64_t{1} << 60});
    return out;
  }();
  return values;
}

// All that can be replaced in a message: its fields, and what is in them.
std::vector<json::json_pointer> places_in(const json& value,
                                          const json::json_pointer& at = json::json_pointer()) {
  std::vector<json::json_pointer> out;
  const auto add = [&](const json::json_pointer& place, const json& inner) {
    out.push_back(place);
    if (!inner.is_structured()) return;
    const auto more = places_in(inner, place);
    out.insert(out.end(), more.begin(), more.end());
  };
  if (value.is_object()) {
    for (const auto& [name, inner] : value.items()) add(at / name, inner);
  } else {
    for (size_t i = 0; i < value.size(); ++i) add(at / i, value[i]);
  }
  return out;
}

void remove(json& message, const json::json_pointer& place) {
  json& parent = message[place.parent_pointer()];
  if (parent.is_object()) {
    parent.erase(place.back());
  } else {
    parent.erase(std::stoul(place.back()));
  }
}

// Each field of a message replaced by each value, and left out.
std::vector<json> variants_of(const json& good) {
  std::vector<json> out = {good, good};  // twice
  for (const json::json_pointer& place : places_in(good)) {
    remove(out.emplace_back(good), place);
    for (const json& value : nasty()) out.emplace_back(good)[place] = value;
  }
  return out;
}

std::string text_of(const json& message) {
  const std::string text = message.dump();
  if (text.find("@deep") == std::string::npos) return text;
  return absl::StrReplaceAll(
      text, {{"\"@deep\"", absl::StrCat(std::string(20000, '['), std::string(20000, ']'))}});
}

class SessionHostileTest : public ::testing::Test {
 protected:
  SessionHostileTest() {
    for (SessionSide* side : std::initializer_list<SessionSide*>{&prefill_, &decode_, &evil_}) {
      for (size_t i = 0; i < side->memory.size(); ++i) {
        side->memory[i] = static_cast<std::byte>(i % 251 + (side == &evil_ ? 1 : 0));
      }
    }
    EXPECT_TRUE(evil_.its->ask_metadata("prefill/0", from_->address()).ok());
    until([&] { return evil_.its->has_remote("prefill/0"); });
    metadata_ = absl::BytesToHexString(*evil_.its->metadata());
  }

  void turn() {
    for (const AgentMessage& each : evil_.its->messages()) {
      json heard = json::parse(each.payload);
      if (heard["kind"] == "want") wants_[heard["transfer"].get<std::string>()] = heard;
      const std::string transfer = heard.value("transfer", "");
      EXPECT_GE(heard.value("lease", 0.0), 0) << where_;
      if (transfer.starts_with("probe-")) last_ = transfer;
      if (transfer == "t") answer_ = heard["kind"];
    }
    from_->turn();
    into_->turn();
    while (const auto loaded = into_->next_loaded()) loaded_[loaded->id] = loaded->status;
    for (const uint64_t send : from_->released()) ++released_[send];
  }
  template <typename Fact>
  void until(Fact fact, CallSite from = CallSite::here()) {
    baton::until(
        fact, [this] { turn(); },
        [this] { return absl::StrCat("at ", where_, "; ", loaded_.size(), " loads over"); }, from);
  }
  void say(const std::string& whom, const json& message) { say_text(whom, text_of(message)); }
  void say_text(const std::string& whom, const std::string& text) {
    absl::Status told;
    until([&] {
      told = evil_.its->notify(whom, text);
      return !absl::IsResourceExhausted(told);
    });
    ASSERT_TRUE(told.ok()) << told;
  }
  // Messages arrive in their order: prefill has heard all that was said before.
  void prefill_has_heard() {
    const std::string probe = absl::StrCat("probe-", ++probes_);
    json want = want_of(probe, "");
    want["sure"] = true;
    say("prefill/0", want);
    until([&] { return last_ == probe; });
  }

  // --- a good load, that goes on while the hostile agent speaks
  void begin_good() {
    id_ = ++loads_;
    name_ = absl::StrCat("good-", id_);
    send_ = from_->open(name_, 16);
    ASSERT_NE(send_, 0u);
    KvOrder order{.id = id_, .from = from_->params_of(name_), .timeout = 24 * kHour};
    order.from.agent = "prefill";
    order.push = id_ % 3 == 1;
    if (id_ % 3 == 2) {
      order.loads = 1;
      order.from.workers = {{"prefill/0", from_->address()}};
    }
    order.runs.push_back({0, {kGood}, {0, 16}});
    ASSERT_TRUE(into_->load(std::move(order)).ok());
    for (int i = 0; i < 4; ++i) turn();
  }
  void finish_good() {
    std::memset(prefill_.block(kGood), static_cast<int>(id_), kBytes);
    ASSERT_TRUE(from_->save(send_, 0, 0, {kGood}).ok());
    from_->hold(send_);
    until([&] { return loaded_.contains(id_); });
    EXPECT_TRUE(loaded_[id_].ok()) << loaded_[id_] << " beside " << where_;
    EXPECT_EQ(std::memcmp(decode_.block(kGood), prefill_.block(kGood), kBytes), 0) << where_;
    goods_.push_back(send_);
  }
  // Nothing of either cache has changed but that block, and all is released when leases are over.
  void check_all() {
    clock_.advance(25 * kHour);
    turn();
    clock_.advance(2 * kHour);
    until([&] {
      return std::all_of(goods_.begin(), goods_.end(),
                         [&](uint64_t send) { return released_.contains(send); });
    });
    for (const auto& [send, times] : released_) EXPECT_EQ(times, 1) << send;
    for (const SessionSide* side : {&prefill_, &decode_}) {
      for (size_t i = 0; i < side->memory.size(); ++i) {
        if (i / kBytes == kGood || (side == &decode_ && i / kBytes == kTheirs)) continue;
        ASSERT_EQ(side->memory[i], static_cast<std::byte>(i % 251)) << "byte " << i;
      }
    }
  }

  // --- what decode says
  json want_of(const std::string& transfer, const std::string& kind) const {
    json want = evil_.cache();
    if (kind.empty()) want.erase("rows");
    want.update({{"kind", "want"},
                 {"transfer", transfer},
                 {"first", false},
                 {"life", 1},
                 {"sure", false},
                 {"metadata", metadata_},
                 {"ranks", 1},
                 {"at", 5}});
    if (kind.empty()) return want;
    const bool push = kind == "push";
    want.update({{"hears", true},
                 {"session", 2},
                 {"load", 7},
                 {"lease", 1.0},
                 {"groups", {0}},
                 {"push", push},
                 {"loads", 1},
                 {"request", 9},
                 {"share", {1, 0, 0}},
                 {"runs", {{0, push ? json{1} : json::array(), 0, 16}}}});
    if (kind == "ask") {
      want["ask"] = {{"tokens", "0000000001000000"},
                     {"first_token", 0},
                     {"request", 9},
                     {"timeout", 5.0},
                     {"decode", "evil"}};
    }
    return want;
  }
  std::vector<json> of_decode(const std::string& t) const {
    return {want_of(t, ""),
            want_of(t, "pull"),
            want_of(t, "push"),
            want_of(t, "ask"),
            {{"kind", "done"}, {"transfer", t}, {"ranks", 1}},
            {{"kind", "done"}, {"transfer", t}, {"ranks", 2}, {"loads", 2}, {"never", true}},
            {{"kind", "done"},
             {"transfer", t},
             {"ranks", 1},
             {"load", 7},
             {"loads", 1},
             {"hears", true},
             {"reading", 1},
             {"read", true}}};
  }
  // --- what prefill says
  std::vector<json> of_prefill(const std::string& t, bool push) {
    const auto crc = static_cast<uint32_t>(
        crc32_z(0, reinterpret_cast<const unsigned char*>(evil_.block(5)), kBytes));
    json layout = evil_.cache();
    layout["kind"] = "layout";
    json moved = {{"kind", "ready"}, {"transfer", t}, {"of", {1, 0}}};
    moved["parts"] = {{0, 0, {{5, crc}}}};
    if (push) {
      moved = {{"kind", "wrote"}, {"transfer", t}};
      moved["parts"] = {{0, 0, {crc}, 16}};
    }
    return {layout,
            {{"kind", "alive"}, {"transfer", t}, {"at", 5}, {"lease", 1.0}, {"reading", 1}},
            moved,
            {{"kind", "over"}, {"transfer", t}, {"payload", "00ff"}, {"writes", 1}},
            {{"kind", "over"}, {"transfer", t}, {"code", 4}, {"why", "late"}},
            {{"kind", "gone"}, {"transfer", t}, {"code", 5}, {"why", "no"}}};
  }
  // A load from the hostile agent, which has heard of it.
  KvRequestId begin_theirs(uint64_t how) {
    const KvRequestId id = ++loads_;
    const std::string name = absl::StrCat("theirs-", id);
    if (evil_.its->has_remote("decode/0")) {
      say("decode/0", of_prefill("", false)[0]);  // its last layout may have been refused
    }
    KvOrder order{.id = id,
                  .from = {.transfer = name,
                           .agent = "evil",
                           .address = absl::StrCat("127.0.0.1:", evil_.its->port())},
                  .timeout = kTenSeconds};
    order.push = how % 3 == 1;
    if (how % 3 == 2) {
      order.loads = 1;
      order.from.workers = {{"evil/0", order.from.address}};
    }
    order.runs.push_back({0, {kTheirs}, {0, 16}});
    EXPECT_TRUE(into_->load(std::move(order)).ok());
    until([&] { return wants_.contains(name); });
    if (!evil_.its->has_remote("decode/0")) {
      const std::string metadata = wants_[name]["metadata"].get<std::string>();
      EXPECT_TRUE(evil_.its->add_remote(absl::HexStringToBytes(metadata)).ok());
    }
    return id;
  }
  // It ends when its time is over and its prefill has said its last word.
  void end_theirs(KvRequestId id) {
    const std::string name = absl::StrCat("theirs-", id);
    say("decode/0", {{"kind", "alive"}, {"transfer", name}});
    say("decode/0", {{"kind", "over"}, {"transfer", name}, {"code", 1}, {"why", "the test's"}});
    turn();
    clock_.advance(kTenSeconds);
    until([&] { return loaded_.contains(id); });
    wants_.erase(name);
  }

  static constexpr uint32_t kGood = 3, kTheirs = 6;
  ManualClock clock_;
  SessionSide evil_{"evil/0", false};
  SessionEnd decode_{"decode/0", clock_, kHour}, prefill_{"prefill/0", clock_, kHour};
  KvSession *const from_ = prefill_.session.get(), *const into_ = decode_.session.get();
  std::string metadata_, where_, last_, name_;
  std::map<std::string, json> wants_;
  std::string answer_;  // the last for transfer "t"
  std::map<KvRequestId, absl::Status> loaded_;
  std::map<uint64_t, int> released_;
  std::vector<uint64_t> goods_;
  uint64_t loads_ = 0, probes_ = 0, id_ = 0, send_ = 0;
};

TEST_F(SessionHostileTest, PrefillLivesWithEveryFieldOfDecodesMessagesWrong) {
  const uint64_t victim = from_->open("victim", 16);
  ASSERT_TRUE(from_->save(victim, 0, 0, {5}).ok());
  goods_.push_back(victim);
  size_t number = 0;
  for (size_t kind = 0; kind < of_decode("").size(); ++kind) {
    for (const json& variant : variants_of(of_decode("@")[kind])) {
      if (number % 32 == 0) begin_good();
      json message = variant;
      const bool asks = message.contains("ask");
      if (message.value("transfer", json()) == "@") {
        message["transfer"] = number % 3 == 0   ? "victim"
                              : number % 3 == 1 ? absl::StrCat("unknown-", number)
                              : asks            ? "asked"
                                                : name_;
      }
      message["life"] = number;
      where_ = message.dump();
      say("prefill/0", message);
      if (number % 32 == 31) {
        prefill_has_heard();
        finish_good();
      }
      if (HasFailure()) return;
      ++number;
    }
  }
  prefill_has_heard();
  if (number % 32 != 0) finish_good();
  from_->hold(victim);
  check_all();
}

// The end of a reader's first load may come behind the want of its next.
TEST_F(SessionHostileTest, TheEndOfOneLoadIsNotThatOfTheNext) {
  const uint64_t send = from_->open("victim", 16);
  json want = want_of("victim", "pull"), done = of_decode("victim").back();
  for (const int load : {7, 8}) {
    want["load"] = load;
    say("prefill/0", want);
  }
  done["read"] = false;
  for (const bool wanted : {true, false}) {
    say("prefill/0", done);
    prefill_has_heard();
    EXPECT_EQ(from_->is_wanted(send), wanted);
    done["load"] = 8;
  }
}

TEST_F(SessionHostileTest, DecodeLivesWithEveryFieldOfPrefillsMessagesWrong) {
  size_t number = 0;
  const size_t kinds = of_prefill("", false).size();
  for (size_t kind = 0; kind < kinds; ++kind) {
    const size_t count = variants_of(of_prefill("@", true)[kind]).size();
    for (size_t which = 0; which < count; ++which, ++number) {
      if (number % 16 == 0) begin_good();
      const bool push = number % 3 == 1;
      const KvRequestId id = begin_theirs(number);
      std::vector<json> all = of_prefill(absl::StrCat("theirs-", id), push);
      const std::vector<json> variants = variants_of(all[kind]);
      all[kind] = variants[which % variants.size()];
      where_ = all[kind].dump();
      // In an order that is right, or begins with what is wrong.
      if (number % 2 == 1) say("decode/0", all[kind]);
      for (size_t i = 0; i <= std::max<size_t>(kind, 2); ++i) {
        if (i < 3 || i == kind) say("decode/0", all[i]);
      }
      if (number % 4 == 3) {
        json other = all[kind];
        other["transfer"] = name_;  // the good load's
        say("decode/0", other);
      }
      const bool right = which < 2 && kind < 3 && !push;
      if (right) until([&] { return loaded_.contains(id); });
      end_theirs(id);
      if (right) {
        EXPECT_TRUE(loaded_[id].ok()) << loaded_[id];
        EXPECT_EQ(std::memcmp(decode_.block(kTheirs), evil_.block(5), kBytes), 0);
      }
      if (number % 16 == 15) finish_good();
      if (HasFailure()) return;
    }
  }
  if (number % 16 != 0) finish_good();
  check_all();
}

// Promise(vllm): Whatever a peer with the key says, a session's other loads go on, and nothing is
//   written outside of what was ordered | each field of each message wrong, and random messages by
//   seed
TEST_F(SessionHostileTest, RandomMessagesInAnyOrder) {
  const Seeds seeds(kSanitized ? 10 : 60);
  for (uint64_t seed = seeds.begin; seed < seeds.end; ++seed) {
    where_ = absl::StrCat("BATON_SEED=", seed);
    std::mt19937_64 random(seed);
    begin_good();
    const bool push = loads_ % 3 == 1;
    const KvRequestId id = begin_theirs(loads_);
    std::vector<json> to_decode = of_prefill(absl::StrCat("theirs-", id), push);
    std::vector<json> to_prefill = of_decode(absl::StrCat("random-", seed));
    for (int i = 0; i < 40; ++i) {
      const bool decode = random() % 2 == 0;
      const std::vector<json>& all = decode ? to_decode : to_prefill;
      json message = all[random() % all.size()];
      for (uint64_t changes = random() % 4; changes > 0; --changes) {
        const auto places = places_in(message);
        if (places.empty()) break;
        const auto& place = places[random() % places.size()];
        if (random() % 4 == 0) {
          remove(message, place);
        } else {
          message[place] = nasty()[random() % nasty().size()];
        }
      }
      std::string text = text_of(message);
      if (random() % 8 == 0) text[random() % text.size()] = static_cast<char>(random());
      say_text(decode ? "decode/0" : "prefill/0", text);
      if (random() % 4 == 0) turn();
      if (random() % 8 == 0) clock_.advance(std::chrono::milliseconds(random() % 600));
    }
    end_theirs(id);
    finish_good();
    if (HasFailure()) return;
  }
  check_all();
}

// What the heap has grown by, in MiB, when `say(n)` was said so often.
template <typename Say>
double mib_after(size_t times, Say say) {
  const auto before = static_cast<double>(mallinfo2().uordblks);
  for (size_t i = 0; i < times; ++i) say(i);
  return (static_cast<double>(mallinfo2().uordblks) - before) / (1 << 20);
}

// With so much in it that 300 of them would be seen in the heap.
std::string much_of(const json& message) {
  static const std::string much(40000, 'x');
  const std::string text = message.dump();
  return absl::StrCat(text.substr(0, text.size() - 1), ",\"more\":\"", much, "\"}");
}

TEST_F(SessionHostileTest, NumbersWithGapsDoNotFillDecodesMemory) {
  for (const bool numbered : {true, false}) {
    const KvRequestId id = begin_theirs(0);
    const double grown = mib_after(700, [&](size_t i) {
      json ready = {{"kind", "ready"}, {"transfer", absl::StrCat("theirs-", id)}};
      ready["parts"] = json::array();
      if (numbered) ready["of"] = {1, (1ULL << 60) + i};
      say_text("decode/0", much_of(ready));
      turn();
    });
    EXPECT_LT(grown, 22);
    end_theirs(id);
  }
}

TEST_F(SessionHostileTest, AReaderThatBeginsAnewEachTimeDoesNotFillPrefillsMemory) {
  const uint64_t send = from_->open("t", 16);
  const double grown = mib_after(300, [&](size_t i) {
    json want = want_of("t", "pull");
    want["life"] = i;
    say_text("prefill/0", much_of(want));
    turn();
  });
  EXPECT_LT(grown, 5);
  for (size_t i = 300; i < 4200; ++i) {
    json want = want_of("t", "pull");
    want["life"] = i;
    say("prefill/0", want);
  }
  until([&] { return answer_ == "gone"; });  // it is refused at last
  from_->drop(send);
}

TEST_F(SessionHostileTest, AsksThatTheEngineNeverLooksAtAreForgotten) {
  const std::string much(20000, 'x');
  const json ask = want_of("@", "ask");
  const auto ask_often = [&](size_t i) {
    say_text("prefill/0", absl::StrReplaceAll(ask.dump(), {{"@", absl::StrCat(i, much)}}));
    if (i % 64 != 63) return;
    prefill_has_heard();
    clock_.advance(25 * kHour);  // the ask is too old
    prefill_has_heard();
  };
  mib_after(64, ask_often);  // buffers of the connection grow once
  EXPECT_LT(mib_after(512, ask_often), 6);
}

}  // namespace
}  // namespace baton::kvtransfer
