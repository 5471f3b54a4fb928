// Frames: what goes in comes out, and nothing else is let in.
#include "transport/tcp/frame.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

namespace baton::tcp {
namespace {

std::vector<Frame> good_frames() {
  return {
      {.type = FrameType::kWrite,
       .flags = kLast,
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
      {.type = FrameType::kWrite, .flags = kLast, .transfer = {1, 1}},
      {.type = FrameType::kWrite,
       .flags = kLast | kAbandoned,
       .transfer = {1, 1},
       .slice_offset = 5,
       .slice_bytes = 10,
       .total_bytes = 10},
      {.type = FrameType::kWriteAck,
       .code = absl::StatusCode::kNotFound,
       .transfer = {1, 2},
       .slice = 3,
       .text = 20},
      {.type = FrameType::kRead,
       .transfer = {1, 2},
       .slice = 3,
       .bytes = 4096,
       .pieces = 1,
       .region = 4,
       .generation = 5,
       .key = 6,
       .slice_offset = 1 << 20},
      {.type = FrameType::kReadData, .transfer = {1, 2}, .slice = 3, .bytes = kMaxPayload},
      {.type = FrameType::kReadEnd, .transfer = {1, 2}, .slice = 3, .slice_offset = kMaxPayload},
      {.type = FrameType::kCancelRead, .transfer = {1, 2}, .slice = 3},
  };
}

std::string encoded(const Frame& frame) {
  std::string out(kHeaderBytes, '\0');
  encode_header(frame, out.data());
  return out;
}

TEST(Frame, RoundTripOfEveryType) {
  for (const Frame& frame : good_frames()) {
    auto back = decode_header(encoded(frame));
    ASSERT_TRUE(back.ok()) << frame_name(frame.type) << ": " << back.status();
    EXPECT_EQ(*back, frame) << frame_name(frame.type);
  }
}

TEST(Frame, WrongSizeIsRefused) {
  const std::string good = encoded(good_frames()[0]);
  for (size_t n = 0; n < good.size(); ++n) {
    EXPECT_FALSE(decode_header(std::string_view(good).substr(0, n)).ok()) << n;
  }
  EXPECT_FALSE(decode_header(good + "x").ok());
}

// Whatever is accepted means exactly what it says: it encodes to the same bytes.
TEST(Frame, DamagedHeadersAreRefusedOrMeanWhatTheySay) {
  std::mt19937 random(1);
  int refused = 0;
  for (int i = 0; i < 200000; ++i) {
    const auto frames = good_frames();
    std::string bytes = encoded(frames[random() % frames.size()]);
    for (uint32_t flips = random() % 4 + 1; flips > 0; --flips) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    auto frame = decode_header(bytes);
    if (!frame.ok()) {
      ++refused;
      continue;
    }
    EXPECT_EQ(encoded(*frame), bytes);
    EXPECT_LE(frame->meta_bytes(), kMaxMeta);
    EXPECT_LE(frame->payload_bytes(), kMaxPayload);
  }
  EXPECT_GT(refused, 50000);
}

TEST(Frame, WhatACorrectPeerNeverSends) {
  const Frame write = good_frames()[0];
  const auto refused = [](Frame frame) { return !decode_header(encoded(frame)).ok(); };
  const auto changed = [&](auto change) {
    Frame frame = write;
    change(frame);
    return frame;
  };
  EXPECT_TRUE(refused(changed([](Frame& f) { f.bytes = kMaxPayload + 1; })));
  EXPECT_TRUE(refused(changed([](Frame& f) { f.pieces = kMaxPieces + 1; })));
  EXPECT_TRUE(refused(changed([](Frame& f) { f.pieces = 0; })));
  EXPECT_TRUE(refused(changed([](Frame& f) { f.text = kMaxNotification + 1; })));
  EXPECT_TRUE(refused(changed([](Frame& f) { f.slice_bytes = f.total_bytes + 1; })));
  EXPECT_TRUE(refused(changed([](Frame& f) { f.slice_offset = f.slice_bytes; })));
  EXPECT_TRUE(refused(changed([](Frame& f) { f.slice_offset = UINT64_MAX - 10; })));
  EXPECT_TRUE(refused(changed([](Frame& f) { f.flags = 0; })));
  EXPECT_TRUE(refused(changed([](Frame& f) { f.flags = 4; })));
  EXPECT_TRUE(refused(changed([](Frame& f) { f.code = absl::StatusCode::kAborted; })));
  Frame ack = good_frames()[3];
  ack.text = kMaxText + 1;
  EXPECT_TRUE(refused(ack));
  Frame read = good_frames()[4];
  read.pieces = 0;
  EXPECT_TRUE(refused(read));
}

TEST(Frame, PiecesMustAddUp) {
  const Frame frame{.type = FrameType::kRead, .bytes = 300, .pieces = 2};
  const auto meta = [](std::vector<WirePiece> pieces) {
    std::string out(pieces.size() * kPieceBytes, '\0');
    for (size_t i = 0; i < pieces.size(); ++i) encode_piece(pieces[i], &out[i * kPieceBytes]);
    return out;
  };
  std::vector<WirePiece> out(kMaxPieces);
  ASSERT_TRUE(decode_pieces(frame, meta({{5, 100}, {900, 200}}), absl::MakeSpan(out)).ok());
  EXPECT_EQ(out[0], (WirePiece{5, 100}));
  EXPECT_EQ(out[1], (WirePiece{900, 200}));
  EXPECT_FALSE(decode_pieces(frame, meta({{5, 100}, {900, 199}}), absl::MakeSpan(out)).ok());
  EXPECT_FALSE(decode_pieces(frame, meta({{5, 300}, {900, 0}}), absl::MakeSpan(out)).ok());
  EXPECT_FALSE(decode_pieces(frame, meta({{5, 100}}), absl::MakeSpan(out)).ok());
  EXPECT_FALSE(
      decode_pieces(frame, meta({{UINT64_MAX - 9, 100}, {0, 200}}), absl::MakeSpan(out)).ok());
}

}  // namespace
}  // namespace baton::tcp
