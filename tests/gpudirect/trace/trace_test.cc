// A trace of the driver's calls: what is written down, and what a replay against the fake tells.
#include "gpudirect/contract/peer_mapping.h"
#include "gpudirect/copies/copier.h"
#include "gpudirect/driver.h"
#include "tests/gpudirect/mutants/flows.h"
#include "tests/gpudirect/trace/replayer.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"

namespace baton::gpudirect {
namespace {

using testing::HasSubstr;

// All that gpudirect/ does with a driver, over the fake.
void record(const std::string& file) {
  for (const Flow& flow : flows()) {
    if (flow.name != std::string("buffer") && flow.name != std::string("ring") &&
        flow.name != std::string("peers")) {
      continue;
    }
    const std::string part = file + "." + flow.name;
    {
      FakeDriver fake({.attributes = flow.attributes()});
      const auto driver = record_calls(FakeDriver::driver(), part);
      ASSERT_TRUE(driver.ok()) << driver.status();
      ASSERT_TRUE(flow.run(fake, *driver).ok()) << flow.name;
      stop_recording();
    }
    const auto replayed = replay(part);
    ASSERT_TRUE(replayed.ok()) << replayed.status();
    EXPECT_EQ(replayed->differences.size(), 0u) << replayed->text(part);
    EXPECT_GT(replayed->calls, 30u);
    EXPECT_LT(replayed->left_out, replayed->calls / 4) << replayed->text(part);
  }
}

std::string read(const std::string& file) {
  std::stringstream text;
  text << std::ifstream(file).rdbuf();
  return text.str();
}

TEST(Trace, RecordedOverTheFakeItReplaysWithoutADifference) {
  TemporaryFolder folder;
  record(folder.path("trace"));
  const std::string text = read(folder.path("trace.buffer"));
  EXPECT_THAT(text, testing::StartsWith("baton-gpu-trace 2 13000\n"));
  EXPECT_THAT(text, HasSubstr("\n1 cuMemCreate 0 >0x"));
}

// A batch of planes is written down with the planes, if they are few, and made again with them.
TEST(Trace, BatchesOfPlanesAreReplayed) {
  TemporaryFolder folder;
  const std::string file = folder.path("planes");
  {
    FakeDriver fake;
    const auto driver = record_calls(FakeDriver::driver(), file);
    ASSERT_TRUE(driver.ok()) << driver.status();
    {
      const auto device = Device::open(*driver, 0);
      const auto slab = DeviceSlab::create(**device, kMiB);
      const auto copier = Copier::open(**device, nullptr, (*device)->stream(Direction::kToHost));
      const DevicePointer at = (*slab)->span().data;
      for (const size_t planes : {3, 30}) {
        std::vector<CopyPiece> pieces;
        for (size_t i = 0; i < 4 * planes; ++i) {
          pieces.push_back({at + (i + i / 4) * 100 + i / 4, at + kMiB / 2 + i * 64, 64});
        }
        ASSERT_TRUE((*copier)->copy_by(CopyWay::kBoxes, CopyRoute::kOnDevice, pieces).ok());
      }
      wait_for_stream(**device, Direction::kToHost);
    }
    stop_recording();
    EXPECT_THAT(fake.finish(), testing::IsEmpty());
  }
  const std::string text = read(file);
  EXPECT_THAT(text, HasSubstr("cuMemcpy3DBatchAsync 0 3 0 0x"));
  EXPECT_THAT(text, HasSubstr("cuMemcpy3DBatchAsync 0 30 0 0x"));
  const auto replayed = replay(file);
  ASSERT_TRUE(replayed.ok()) << replayed.status();
  EXPECT_EQ(replayed->differences.size(), 0u) << replayed->text("planes");
  EXPECT_EQ(replayed->left_out, 1u);  // the 30 planes
  // Rows that are longer than the distance between them: the fake sees that.
  std::string other = text;
  const size_t width = other.find(",64,4,1}");
  ASSERT_NE(width, std::string::npos);
  other.replace(width, 3, ",65");
  std::ofstream(folder.path("other")) << other;
  EXPECT_THAT(replay(folder.path("other"))->text("other"), HasSubstr("its rows overlap"));
}

// A line that was changed by hand is noticed, and in which direction.
TEST(Trace, WhatADriverAnswersOtherwiseIsTold) {
  TemporaryFolder folder;
  record(folder.path("trace"));
  const std::string text = read(folder.path("trace.buffer"));
  const auto changed = [&](const std::string& from, const std::string& to) {
    std::string other = text;
    const size_t at = other.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    other.replace(at, from.size(), to);
    std::ofstream(folder.path("other")) << other;
    const auto replayed = replay(folder.path("other"));
    EXPECT_TRUE(replayed.ok()) << replayed.status();
    return replayed.ok() ? replayed->text("other") : "";
  };
  EXPECT_THAT(changed("cuMemMap 0", "cuMemMap 2"), HasSubstr("(the fake is looser)"));
  EXPECT_THAT(changed(" 2097152 {1,0,1}", " 2097153 {1,0,1}"), HasSubstr("(the fake is stricter)"));
  EXPECT_THAT(
      changed("cuMemGetAllocationGranularity 0 >2097152", "cuMemGetAllocationGranularity 0 >65536"),
      HasSubstr("the granularity is 65536 with the driver"));
}

// Recorded by `./run gpu` on an H200, driver 580.159; of calls that repeat, and of questions that
// were answered "not yet", some are left out.
TEST(Trace, TheFakeAnswersAsTheDriverOfAnH200Did) {
  const auto replayed = replay(H200_TRACE);
  ASSERT_TRUE(replayed.ok()) << replayed.status();
  EXPECT_EQ(replayed->differences.size(), 0u) << replayed->text("h200.txt");
  EXPECT_GT(replayed->calls, 2000u);
}

TEST(Trace, AMalformedTraceIsRefused) {
  TemporaryFolder folder;
  folder.file("one", "hello").file("two", "baton-gpu-trace 2 13000\ncuInit");
  EXPECT_EQ(replay(folder.path("none")).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(replay(folder.path("one")).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(replay(folder.path("two")).status().message()), HasSubstr("two:2"));
  FakeDriver fake;
  EXPECT_FALSE(record_calls(FakeDriver::driver(), folder.path("no/such/folder")).ok());
}

}  // namespace
}  // namespace baton::gpudirect
