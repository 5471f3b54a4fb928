// Frames that are refused, and batches of them; that what goes in comes out is for frame_fuzz.
#include "transport/framed/frame.h"

#include <string>

#include "tests/test.h"
#include "transport/tcp/tx_batch.h"

namespace baton::tcp {
namespace {

std::string encoded_header(const framed::Frame& frame) {
  std::string out(framed::kHeaderBytes, '\0');
  framed::encode_header(frame, out.data());
  return out;
}

TEST(Frame, WhatACorrectPeerNeverSends) {
  const framed::Frame write{.type = framed::FrameType::kWrite,
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
                            .increment = 11};
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
  EXPECT_FALSE(refused(write));
  framed::Frame ack{.type = framed::FrameType::kWriteAck, .transfer = {1, 2}, .slice = 3};
  EXPECT_FALSE(refused(ack));
  ack.text = framed::kMaxText + 1;
  EXPECT_TRUE(refused(ack));
  framed::Frame read{.type = framed::FrameType::kRead,
                     .transfer = {1, 2},
                     .slice = 3,
                     .bytes = 4096,
                     .pieces = 1,
                     .region = 4,
                     .generation = 5,
                     .key = 6};
  EXPECT_FALSE(refused(read));
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
