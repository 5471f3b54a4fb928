// Messages between decode and prefill: what is sent is what is read, and nothing else is accepted.
#include "kvtransfer/internal/connector/kv_messages.h"

#include "tests/random_fields.h"
#include "tests/test.h"
#include "transport/transfer.h"

namespace baton::kvtransfer {
namespace {

using ::testing::HasSubstr;

KvLoadRequest a_request(uint32_t tokens = 100, uint32_t first_token = 32) {
  KvLoadRequest request;
  request.request = 77;
  request.decode = "decode-0";
  request.key = "request 77";
  request.loads_of_key = 3;
  request.share = {4, 2, 9};
  request.timeout = std::chrono::seconds(3);
  for (uint32_t i = 0; i < tokens; ++i) request.tokens.push_back(static_cast<int32_t>(i * 3));
  request.first_token = first_token;
  request.layout = KvLayout::dense(4, 100000, 16, 2, 64, "test");
  const auto blocks = request.layout.blocks_for(tokens) - first_token / 16;
  for (uint32_t i = 0; i < blocks; ++i) request.blocks.push_back(99 + i * 2);
  KvRemoteBuffer buffer{.region = {}, .offset = 4096};
  buffer.region.owner = WorkerUid::random();
  buffer.region.size = request.layout.bytes() + 8192;
  buffer.region.generation = 1;
  buffer.region.access = Access::kRemoteWrite;
  request.buffers = {buffer};
  for (uint32_t i = 0; i < 4; ++i) request.counters.push_back({buffer.region.owner, 10 + i, 1});
  return request;
}

TEST(KvMessages, RequestsSurviveTheWire) {
  const KvLoadRequest request = a_request();
  std::string body;
  ASSERT_TRUE(encode_kv(request, body).ok());
  KvLoadRequest again;
  const absl::Status status = decode_kv(body, again);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(again.request, 77u);
  EXPECT_EQ(again.decode, "decode-0");
  EXPECT_EQ(again.key, "request 77");
  EXPECT_EQ(again.loads_of_key, 3u);
  EXPECT_EQ(again.share, request.share);
  EXPECT_EQ(again.timeout, request.timeout);
  EXPECT_EQ(again.tokens, request.tokens);
  EXPECT_EQ(again.first_token, 32u);
  EXPECT_EQ(again.blocks, request.blocks);
  EXPECT_EQ(again.layout, request.layout);
  ASSERT_EQ(again.buffers.size(), 1u);
  EXPECT_EQ(again.buffers[0].region.encode(), request.buffers[0].region.encode());
  EXPECT_EQ(again.buffers[0].offset, 4096u);
  ASSERT_EQ(again.counters.size(), 4u);
  EXPECT_EQ(again.counters[3].encode(), request.counters[3].encode());
  for (size_t cut = 0; cut < body.size(); ++cut) {
    EXPECT_FALSE(decode_kv(body.substr(0, cut), again).ok()) << cut;
  }
  EXPECT_FALSE(decode_kv(body + "x", again).ok());
}

// What releases before this one wrote of the same values.
// Promise(kv): KV messages of versions 3 and 4 keep their bytes | digests of what 0.1 wrote
TEST(KvMessages, TheWireIsWhatItWas) {
  const auto digest = [](const std::string& bytes) {
    uint64_t fnv = 14695981039346656037U;
    for (const char byte : bytes) fnv = (fnv ^ static_cast<uint8_t>(byte)) * 1099511628211U;
    return std::pair(bytes.size(), fnv);
  };
  KvLoadRequest request = a_request();
  RemoteRegion& region = request.buffers[0].region;
  region.owner.bytes.fill(7);
  region.key = 5;
  region.access = Access::kRemoteReadWrite;
  for (RemoteCounter& counter : request.counters) counter.owner = region.owner;
  EXPECT_EQ(digest(kv_bytes(request)), std::pair(size_t{713}, uint64_t{0x43a5bc9b1de339d5}));
  const KvOffer offer{std::chrono::seconds(3), request.layout, request.buffers};
  EXPECT_EQ(digest(kv_bytes(offer)), std::pair(size_t{203}, uint64_t{0xbdd152195bc57fa4}));
  request.pull = true;
  request.lease = std::chrono::seconds(9);
  request.buffers.clear();
  request.counters.clear();
  EXPECT_EQ(digest(kv_bytes(request)), std::pair(size_t{641}, uint64_t{0xbb5f3bd52bc8720d}));
  const KvReady ready{3, 9, {7, 5, 6}};
  EXPECT_EQ(digest(kv_bytes(ready)), std::pair(size_t{24}, uint64_t{0x56df0bf6af173e48}));
  EXPECT_EQ(digest(kv_bytes(KvLease{4, Time(5)})),
            std::pair(size_t{16}, uint64_t{0xa9181db43578e1c4}));
  const KvRenewal renewal{std::chrono::seconds(5)};
  EXPECT_EQ(digest(kv_bytes(renewal)), std::pair(size_t{8}, uint64_t{0x7cb5b6be393dace5}));
}

TEST(KvMessages, ContradictoryRequestsAreRefused) {
  const auto refused = [](auto change) {
    KvLoadRequest request = a_request();
    change(request);
    std::string body;
    EXPECT_TRUE(absl::IsInvalidArgument(encode_kv(request, body)));
  };
  refused([](KvLoadRequest& r) { r.first_token = 31; });
  refused([](KvLoadRequest& r) { r.key = std::string(257, 'k'); });
  refused([](KvLoadRequest& r) { r.loads_of_key = 0; });
  refused([](KvLoadRequest& r) { r.share.ranks = 0; });
  refused([](KvLoadRequest& r) { r.share.rank = 4; });
  refused([](KvLoadRequest& r) { r.share.ranks = UINT32_MAX; });
  refused([](KvLoadRequest& r) { r.first_token = 100; });
  refused([](KvLoadRequest& r) { r.tokens.clear(); });
  refused([](KvLoadRequest& r) { r.blocks.pop_back(); });
  refused([](KvLoadRequest& r) { r.blocks.push_back(1); });
  refused([](KvLoadRequest& r) { r.blocks[0] = 100000; });
  refused([](KvLoadRequest& r) { r.counters.pop_back(); });
  refused([](KvLoadRequest& r) { r.counters[1].generation = 0; });
  refused([](KvLoadRequest& r) { r.counters[1].owner = WorkerUid::random(); });
  refused([](KvLoadRequest& r) { r.buffers[0].region.access = Access::kRemoteRead; });
  refused([](KvLoadRequest& r) { r.buffers[0].offset = r.buffers[0].region.size; });
  refused([](KvLoadRequest& r) { r.buffers[0].offset = UINT64_MAX; });
  refused([](KvLoadRequest& r) { r.buffers[0].region.size = r.layout.bytes(); });
  refused([](KvLoadRequest& r) { r.timeout = Time::zero(); });
  refused([](KvLoadRequest& r) { r.timeout = kNever; });
  refused([](KvLoadRequest& r) { r.decode = std::string(65, 'x'); });
  refused([](KvLoadRequest& r) { r.layout.groups[0].layers.clear(); });
  refused([](KvLoadRequest& r) { r.tokens.resize(r.tokens.size() + 17); });
}

std::vector<std::string> parts_of(KvMessageKind kind, uint64_t load, const std::string& body) {
  std::vector<std::string> parts;
  size_t offset = 0;
  do {
    encode_kv_part(kind, load, body, offset, parts.emplace_back());
  } while (offset < body.size());
  return parts;
}

KvMessagePart decoded(const std::string& notification) {
  KvMessagePart part;
  const absl::Status status = decode_kv_part(notification, part);
  EXPECT_TRUE(status.ok()) << status;
  return part;
}

TEST(KvMessages, LongOnesTravelInPartsOfAnyOrder) {
  std::string body;
  ASSERT_TRUE(encode_kv(a_request(100'000, 0), body).ok());
  std::vector<std::string> parts = parts_of(KvMessageKind::kRequest, 5, body);
  EXPECT_EQ(parts.size(), 7u);
  for (const std::string& part : parts) EXPECT_LE(part.size(), kMaxNotification);
  std::mt19937 random(1);
  KvAssembler assembler;
  for (int round = 0; round < 10; ++round) {
    std::shuffle(parts.begin(), parts.end(), random);
    std::string again;
    for (size_t i = 0; i < parts.size(); ++i) {
      const absl::StatusOr<bool> whole = assembler.add(decoded(parts[i]), again);
      ASSERT_TRUE(whole.ok()) << whole.status();
      EXPECT_EQ(*whole, i + 1 == parts.size());
    }
    EXPECT_EQ(again, body);
    EXPECT_EQ(assembler.open(), 0u);
    EXPECT_EQ(assembler.held(), 0u);
  }
}

TEST(KvMessages, APartThatComesTwiceOrContradictsDropsItsMessage) {
  const std::string body(3 * kKvPartBytes, 'x');
  const auto parts = parts_of(KvMessageKind::kRequest, 5, body);
  const auto shorter = parts_of(KvMessageKind::kRequest, 5, body.substr(0, 2 * kKvPartBytes));
  KvAssembler assembler;
  std::string out;
  ASSERT_FALSE(*assembler.add(decoded(parts[0]), out));
  EXPECT_TRUE(absl::IsInvalidArgument(assembler.add(decoded(parts[0]), out).status()));
  EXPECT_EQ(assembler.open(), 0u);
  ASSERT_FALSE(*assembler.add(decoded(parts[0]), out));
  EXPECT_TRUE(absl::IsInvalidArgument(assembler.add(decoded(shorter[1]), out).status()));
  EXPECT_EQ(assembler.open(), 0u);
  EXPECT_EQ(assembler.held(), 0u);
}

TEST(KvMessages, APeerCannotMakeUsHoldMoreThanTheLimits) {
  KvAssembler assembler;
  std::string out;
  size_t refused = 0;
  for (uint64_t load = 1; load <= 400; ++load) {
    const auto parts = parts_of(KvMessageKind::kRequest, load, std::string(5 * kKvPartBytes, 'x'));
    for (size_t i = 0; i < 4; ++i) {
      refused += !assembler.add(decoded(parts[i]), out).ok();
      ASSERT_LE(assembler.open(), KvAssembler::kMaxOpen);
      ASSERT_LE(assembler.held(), KvAssembler::kMaxHeld);
    }
  }
  EXPECT_GT(refused, 0u);
}

TEST(KvMessages, OnlyPartsAreParts) {
  KvMessagePart part;
  const std::string good = parts_of(KvMessageKind::kCancel, 9, "")[0];
  ASSERT_TRUE(decode_kv_part(good, part).ok());
  EXPECT_EQ(part.load, 9u);
  for (size_t cut = 0; cut < good.size(); ++cut) {
    EXPECT_FALSE(decode_kv_part(good.substr(0, cut), part).ok());
    EXPECT_EQ(part.load, 0u);
  }
  EXPECT_FALSE(decode_kv_part(good + "x", part).ok());
  const auto with = [&](size_t at, char value) {
    std::string bytes = good;
    bytes[at] = value;
    return decode_kv_part(bytes, part);
  };
  EXPECT_FALSE(with(0, 'X').ok());  // magic
  EXPECT_FALSE(with(6, 0).ok());    // kind
  EXPECT_FALSE(with(6, 8).ok());    // an offer, but not of its version
  EXPECT_TRUE(with(6, 13).ok());    // that one is alive, which is of this version
  EXPECT_FALSE(with(6, 14).ok());
  EXPECT_FALSE(with(4, kKvPullVersion).ok());  // a cancel has no such version
  EXPECT_FALSE(with(8, 0).ok());               // load 0
  EXPECT_FALSE(with(19, 0x7f).ok());           // a total of two gigabytes
  EXPECT_FALSE(with(20, 1).ok());              // an offset past the end
  const absl::Status version = with(4, kKvPullVersion + 1);
  EXPECT_TRUE(absl::IsFailedPrecondition(version));
  EXPECT_THAT(std::string(version.message()), HasSubstr("same release"));
  EXPECT_EQ(part.load, 9u);  // so that the sender can be told
}

TEST(KvMessages, WhatOnlyPullsNeedSurvivesTheWire) {
  KvLoadRequest request = a_request();
  KvOffer offer{std::chrono::seconds(3), request.layout, request.buffers};
  std::string body;
  EXPECT_FALSE(encode_kv(offer, body).ok()) << "peers may not read it";
  offer.buffers[0].region.access = Access::kRemoteRead;
  ASSERT_TRUE(encode_kv(offer, body).ok());
  KvOffer offered;
  ASSERT_TRUE(decode_kv(body, offered).ok());
  EXPECT_EQ(offered.lease, offer.lease);
  EXPECT_EQ(offered.layout, offer.layout);
  EXPECT_EQ(offered.buffers[0].offset, 4096u);
  for (size_t cut = 0; cut < body.size(); ++cut) {
    EXPECT_FALSE(decode_kv(body.substr(0, cut), offered).ok());
  }
  EXPECT_FALSE(decode_kv(body + "x", offered).ok());
  const auto refused = [&](auto change) {
    KvOffer bad = offer;
    change(bad);
    return !bad.check().ok();
  };
  EXPECT_TRUE(refused([](KvOffer& o) { o.lease = Time(0); }));
  EXPECT_TRUE(refused([](KvOffer& o) { o.lease = std::chrono::hours(25); }));
  EXPECT_TRUE(refused([](KvOffer& o) { o.buffers.clear(); }));
  EXPECT_TRUE(refused([](KvOffer& o) { o.buffers[0].region.size = o.layout.bytes(); }));

  request.pull = true;
  request.lease = std::chrono::seconds(9);
  EXPECT_FALSE(encode_kv(request, body).ok()) << "nobody is to write";
  request.buffers.clear();
  request.counters.clear();
  ASSERT_TRUE(encode_kv(request, body).ok());
  KvLoadRequest again;
  EXPECT_FALSE(decode_kv(body, again).ok());
  again.pull = true;
  ASSERT_TRUE(decode_kv(body, again).ok());
  EXPECT_EQ(again.lease, request.lease);
  EXPECT_EQ(again.blocks, request.blocks);
  request.lease = Time(0);
  EXPECT_FALSE(request.check().ok());

  // A load has many of these under way, and parts of two are not told apart.
  for (const size_t count : {KvReady::kMaxBlocks, KvReady::kMaxBlocks + 1}) {
    size_t offset = 0;
    std::string notification;
    encode_kv_part(KvMessageKind::kReady, 1,
                   kv_bytes(KvReady{0, 0, std::vector<uint32_t>(count, 1)}), offset, notification);
    KvMessagePart part;
    EXPECT_EQ(decode_kv_part(notification, part).ok(), count == KvReady::kMaxBlocks);
  }
}

TEST(KvMessages, FailuresKeepCodeAndText) {
  const absl::Status why = absl::FailedPreconditionError("give both workers the same block size");
  EXPECT_EQ(decode_kv_failure(encode_kv_failure(why)), why);
  const std::string long_text(10'000, 'x');
  const std::string body = encode_kv_failure(absl::InternalError(long_text));
  EXPECT_LE(body.size(), kMaxKvReply);
  EXPECT_TRUE(absl::IsInternal(decode_kv_failure(body)));
  EXPECT_TRUE(absl::IsInvalidArgument(decode_kv_failure("")));
  EXPECT_TRUE(absl::IsInvalidArgument(decode_kv_failure(std::string(6, '\0'))));  // "OK"
}

TEST(KvMessages, ValuesThatNoWorkerMeansAreRefused) {
  const auto refused = [](const auto& body) {
    auto read = body;
    return absl::IsInvalidArgument(decode_kv(kv_bytes(body), read));
  };
  EXPECT_FALSE(refused(KvReady{3, 9, {7}}));
  EXPECT_TRUE(refused(KvReady{3, 9, {}}));
  EXPECT_FALSE(refused(KvLease{4, Time(5)}));
  EXPECT_TRUE(refused(KvLease{4, Time(0)}));
  EXPECT_FALSE(refused(KvRenewal{Time(5)}));
  EXPECT_TRUE(refused(KvRenewal{Time(0)}));
  EXPECT_TRUE(refused(KvRenewal{KvLoadRequest::kMaxTimeout + Time(1)}));
}

TEST(KvMessages, ShortBodiesKeepTheirWireProperties) {
  for (uint32_t seed = 0; seed < 100; ++seed) {
    expect_wire_properties<KvReady>(seed);
    expect_wire_properties<KvLease>(seed);
    expect_wire_properties<KvRenewal>(seed);
  }
}

TEST(KvMessages, WhatHasComeSurvivesTheWire) {
  std::string arrived;
  const std::string body = encode_kv_failure(absl::InternalError("gone"), "\x05\x80");
  EXPECT_TRUE(absl::IsInternal(decode_kv_failure(body, &arrived)));
  EXPECT_EQ(arrived, "\x05\x80");
  EXPECT_TRUE(
      absl::IsInternal(decode_kv_failure(encode_kv_failure(absl::InternalError("")), &arrived)));
  EXPECT_EQ(arrived, "");
}

TEST(KvSeenLoads, EachLoadIsNewOnce) {
  std::vector<uint64_t> loads(3000);
  for (size_t i = 0; i < loads.size(); ++i) loads[i] = i + 1;
  std::mt19937 random(7);
  std::shuffle(loads.begin(), loads.end(), random);
  KvSeenLoads seen;
  for (uint64_t load : loads) EXPECT_TRUE(*seen.add(load));
  for (uint64_t load : loads) EXPECT_FALSE(*seen.add(load));
}

TEST(KvSeenLoads, AHostilePeerCannotMakeItGrow) {
  KvSeenLoads seen;
  size_t taken = 0;
  for (uint64_t load = 2; load < 20'000; load += 2) taken += seen.add(load).ok();
  EXPECT_EQ(taken, KvSeenLoads::kMaxAhead);
  EXPECT_TRUE(*seen.add(1));  // the one that is missing is always welcome
  EXPECT_FALSE(*seen.add(2));
}

}  // namespace
}  // namespace baton::kvtransfer
