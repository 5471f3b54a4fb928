// Frames: what goes in comes out, and nothing else is let in.
#include "transport/framed/frame.h"

#include <string>

#include "tests/test.h"
#include "transport/tcp/tx_batch.h"

namespace baton::tcp {
namespace {

std::vector<framed::Frame> good_frames() {
  return {
      {.type = framed::FrameType::kWrite,
       .flags = framed::kLast,
       .transfer = {3, 9},
       .slice = 5,
       .bytes = 300,
       .pieces = 2,
       .text = 4,
       .region = 1,
       .generation = 2,
       .key = 0x1122334455667788,
       .slice_offset = 700,
       .slice_bytes = 1000,
       .total_bytes = 1 << 30,
       .counter = 7,
       .counter_generation = 3,
       .increment = 11},
      {.type = framed::FrameType::kWrite, .flags = framed::kLast, .transfer = {1, 1}},
      {.type = framed::FrameType::kWrite,
       .flags = framed::kLast | framed::kAbandoned,
       .transfer = {1, 1},
       .slice_offset = 5,
       .slice_bytes = 10,
       .total_bytes = 10},
      {.type = framed::FrameType::kWriteAck,
       .code = absl::StatusCode::kNotFound,
       .transfer = {1, 2},
       .slice = 3,
       .text = 20},
      {.type = framed::FrameType::kRead,
       .transfer = {1, 2},
       .slice = 3,
       .bytes = 4096,
       .pieces = 1,
       .region = 4,
       .generation = 5,
       .key = 6,
       .slice_offset = 1 << 20},
      {.type = framed::FrameType::kReadData,
       .transfer = {1, 2},
       .slice = 3,
       .bytes = framed::kMaxPayload},
      {.type = framed::FrameType::kReadEnd,
       .transfer = {1, 2},
       .slice = 3,
       .slice_offset = framed::kMaxPayload},
      {.type = framed::FrameType::kCancelRead, .transfer = {1, 2}, .slice = 3},
  };
}

std::string encoded_header(const framed::Frame& frame) {
  std::string out(framed::kHeaderBytes, '\0');
  framed::encode_header(frame, out.data());
  return out;
}

TEST(Frame, RoundTripOfEveryType) {
  for (const framed::Frame& frame : good_frames()) {
    auto back = framed::decode_header(encoded_header(frame));
    ASSERT_TRUE(back.ok()) << framed::frame_name(frame.type) << ": " << back.status();
    EXPECT_EQ(*back, frame) << framed::frame_name(frame.type);
  }
}

TEST(Frame, WrongSizeIsRefused) {
  const std::string good = encoded_header(good_frames()[0]);
  for (size_t n = 0; n < good.size(); ++n) {
    EXPECT_FALSE(framed::decode_header(std::string_view(good).substr(0, n)).ok()) << n;
  }
  EXPECT_FALSE(framed::decode_header(good + "x").ok());
}

// Whatever is accepted means exactly what it says: it encodes to the same bytes.
TEST(Frame, DamagedHeadersAreRefusedOrMeanWhatTheySay) {
  std::mt19937 random(1);
  int refused = 0;
  for (int i = 0; i < 200000; ++i) {
    const auto frames = good_frames();
    std::string bytes = encoded_header(frames[random() % frames.size()]);
    for (uint32_t flips = random() % 4 + 1; flips > 0; --flips) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    auto frame = framed::decode_header(bytes);
    if (!frame.ok()) {
      ++refused;
      continue;
    }
    EXPECT_EQ(encoded_header(*frame), bytes);
    EXPECT_LE(frame->meta_bytes(), framed::kMaxMeta);
    EXPECT_LE(frame->payload_bytes(), framed::kMaxPayload);
  }
  EXPECT_GT(refused, 50000);
}

TEST(Frame, WhatACorrectPeerNeverSends) {
  const framed::Frame write = good_frames()[0];
  const auto refused = [](framed::Frame frame) {
    return !framed::decode_header(encoded_header(frame)).ok();
  };
  const auto changed = [&](auto change) {
    framed::Frame frame = write;
    change(frame);
    return frame;
  };
  EXPECT_TRUE(refused(changed([](framed::Frame& f) { f.bytes = framed::kMaxPayload + 1; })));
  EXPECT_TRUE(refused(changed([](framed::Frame& f) { f.pieces = framed::kMaxPieces + 1; })));
  EXPECT_TRUE(refused(changed([](framed::Frame& f) { f.pieces = 0; })));
  EXPECT_TRUE(refused(changed([](framed::Frame& f) { f.text = kMaxNotification + 1; })));
  EXPECT_TRUE(refused(changed([](framed::Frame& f) { f.slice_bytes = f.total_bytes + 1; })));
  EXPECT_TRUE(refused(changed([](framed::Frame& f) { f.slice_offset = f.slice_bytes; })));
  EXPECT_TRUE(refused(changed([](framed::Frame& f) { f.slice_offset = UINT64_MAX - 10; })));
  EXPECT_TRUE(refused(changed([](framed::Frame& f) { f.flags = 0; })));
  EXPECT_TRUE(refused(changed([](framed::Frame& f) { f.flags = 4; })));
  EXPECT_TRUE(refused(changed([](framed::Frame& f) { f.code = absl::StatusCode::kAborted; })));
  framed::Frame ack = good_frames()[3];
  ack.text = framed::kMaxText + 1;
  EXPECT_TRUE(refused(ack));
  framed::Frame read = good_frames()[4];
  read.pieces = 0;
  EXPECT_TRUE(refused(read));
}

TEST(Frame, PiecesMustAddUp) {
  const framed::Frame frame{.type = framed::FrameType::kRead, .bytes = 300, .pieces = 2};
  const auto meta = [](std::vector<framed::WirePiece> pieces) {
    std::string out(pieces.size() * framed::kPieceBytes, '\0');
    for (size_t i = 0; i < pieces.size(); ++i)
      framed::encode_piece(pieces[i], &out[i * framed::kPieceBytes]);
    return out;
  };
  std::vector<framed::WirePiece> out(framed::kMaxPieces);
  ASSERT_TRUE(framed::decode_pieces(frame, meta({{5, 100}, {900, 200}}), absl::MakeSpan(out)).ok());
  EXPECT_EQ(out[0], (framed::WirePiece{5, 100}));
  EXPECT_EQ(out[1], (framed::WirePiece{900, 200}));
  EXPECT_FALSE(
      framed::decode_pieces(frame, meta({{5, 100}, {900, 199}}), absl::MakeSpan(out)).ok());
  EXPECT_FALSE(framed::decode_pieces(frame, meta({{5, 300}, {900, 0}}), absl::MakeSpan(out)).ok());
  EXPECT_FALSE(framed::decode_pieces(frame, meta({{5, 100}}), absl::MakeSpan(out)).ok());
  EXPECT_FALSE(
      framed::decode_pieces(frame, meta({{UINT64_MAX - 9, 100}, {0, 200}}), absl::MakeSpan(out))
          .ok());
}

// How a batch of writes leaves, each with a header of `head` bytes: the runs of bytes, and all
// bytes.
std::pair<size_t, std::string> sent_of(const std::vector<std::string>& payloads, size_t head) {
  TxBatch::Memory memory;
  TxBatch batch;
  batch.lend(&memory);
  std::vector<std::string> kept = payloads;
  for (std::string& payload : kept) {
    const size_t header = batch.open_header();
    std::memset(batch.next_header(), 'h', head);
    batch.add_payload(reinterpret_cast<std::byte*>(payload.data()), payload.size(), header);
    if (!batch.commit_inlined(header, head)) batch.commit_header(header, head);
  }
  std::string bytes;
  for (size_t i = 0; i < batch.vectors(); ++i) {
    bytes.append(static_cast<const char*>(batch.vector(i).iov_base), batch.vector(i).iov_len);
  }
  return {batch.vectors(), bytes};
}

TEST(Batch, SmallPayloadsLeaveWithTheirHeadersAsOneRun) {
  const std::string small(TxBatch::kInlined, 's'), large(TxBatch::kInlined + 1, 'l');
  const std::string head(100, 'h');
  using Sent = std::pair<size_t, std::string>;
  EXPECT_EQ(sent_of({small}, 100), Sent(1, head + small));
  EXPECT_EQ(sent_of({small, small}, 100), Sent(1, head + small + head + small));
  EXPECT_EQ(sent_of({large}, 100), Sent(2, head + large));
  EXPECT_EQ(sent_of({small, large, small}, 100),
            Sent(4, head + small + head + large + head + small));
}

TEST(Batch, APayloadIsNotCopiedPastTheEndOfTheArena) {
  const std::string small(TxBatch::kInlined, 's');
  const size_t most = TxBatch::kArenaBytes - TxBatch::kInlined;
  EXPECT_EQ(sent_of({small}, most).first, 1U);
  EXPECT_EQ(sent_of({small}, most + 1).first, 2U);
}

}  // namespace
}  // namespace baton::tcp
