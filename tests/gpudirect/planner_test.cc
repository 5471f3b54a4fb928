// The planner: shapes, prices and choices; and over the fake, that any list is copied. Every way on
// every route is flows/flows.cc's.
#include "gpudirect/copies/planner.h"

#include "gpudirect/copies/copier.h"
#include "tests/gpudirect/fake/made_up_costs.h"
#include "tests/gpudirect/fake/with_device.h"
#include "tests/test.h"

namespace baton::gpudirect {
namespace {

using ::testing::HasSubstr;

constexpr CopyWay kAll[] = {CopyWay::kSingle, CopyWay::kRows, CopyWay::kBatch, CopyWay::kPacked,
                            CopyWay::kKernel};
constexpr CopyRoute kRoutes[] = {CopyRoute::kToHost, CopyRoute::kToDevice, CopyRoute::kOnDevice};

TEST(Planner, NeighboursBecomeOnePiece) {
  std::vector<CopyPiece> out;
  merge_pieces(
      std::vector<CopyPiece>{{0, 100, 10}, {10, 110, 5}, {15, 120, 5}, {7, 7, 0}, {20, 125, 1}},
      out);
  ASSERT_EQ(out.size(), 2u);
  EXPECT_EQ(out[0].bytes, 15u);
  EXPECT_EQ(out[1].bytes, 6u);
}

TEST(Planner, ShapesSayWhichWaysThereAre) {
  const std::vector<CopyPiece> even = {{0, 1000, 10}, {30, 1010, 10}, {60, 1020, 10}};
  CopyShape shape = shape_of(even);
  EXPECT_TRUE(shape.rows && shape.to_in_row && !shape.from_in_row);
  EXPECT_EQ(shape.bytes, 30u);
  EXPECT_TRUE(ways_for(CopyRoute::kToHost, shape).has(CopyWay::kPacked));
  EXPECT_FALSE(ways_for(CopyRoute::kToDevice, shape).has(CopyWay::kPacked));
  EXPECT_FALSE(ways_for(CopyRoute::kOnDevice, shape).has(CopyWay::kPacked));
  shape = shape_of(std::vector<CopyPiece>{{0, 1000, 10}, {30, 1010, 10}, {50, 1020, 10}});
  EXPECT_FALSE(shape.rows);
  shape = shape_of(std::vector<CopyPiece>{{60, 1000, 10}, {30, 1010, 10}, {0, 1020, 10}});
  EXPECT_FALSE(shape.rows) << "backwards";
  shape = shape_of(std::vector<CopyPiece>{{0, 1000, 10}, {30, 1010, 11}});
  EXPECT_FALSE(shape.rows) << "of two sizes";
  // No row may be further from the next one than the driver counts, also where there is none.
  EXPECT_TRUE(shape_of(std::vector<CopyPiece>{{0, 0, (1u << 31) - 1}}).rows);
  EXPECT_FALSE(shape_of(std::vector<CopyPiece>{{0, 0, 1u << 31}}).rows);
}

TEST(Planner, PricesLieBetweenThoseOfTheTable) {
  CopyTable table;
  // A power of the size, and one of the count: what straight lines in logarithms hit everywhere.
  const auto cost = [](size_t size, size_t count) {
    return 1000 * std::pow(static_cast<double>(size), 0.5) *
           std::pow(static_cast<double>(count), 0.25);
  };
  table.fill(CopyRoute::kToHost, CopyWay::kBatch, cost);
  const auto price = [&](size_t pieces, size_t size) {
    return table.nanoseconds(CopyRoute::kToHost, CopyWay::kBatch, pieces, pieces * size);
  };
  for (const size_t size : {1024u, 2560u, 4096u, 300'000u, 1u << 20}) {
    for (const size_t count : {1u, 2u, 4u, 9u, 1000u, 1024u}) {
      EXPECT_NEAR(price(count, size) / cost(size, count), 1, 1e-9) << count << " x " << size;
    }
  }
  EXPECT_DOUBLE_EQ(price(10, 16), price(10, 1024)) << "no cheaper than the smallest of the table";
  EXPECT_NEAR(price(2, 8 << 20) / price(2, 1 << 20), 8, 1e-9);
  EXPECT_NEAR(price(4096, 4096) / price(1024, 4096), 4, 1e-9);
  EXPECT_EQ(price(0, 0), 0);
  // A bend at one place of the table is nowhere else than beside it.
  table.set(CopyRoute::kToHost, CopyWay::kBatch, 2, 5, 7);
  EXPECT_NEAR(price(64, 16384), 7, 1e-9);
  EXPECT_LT(price(63, 16383), 10);
  EXPECT_NEAR(price(16, 16384) / cost(16384, 16), 1, 1e-9);
}

TEST(Planner, TheCheapestIsChosenWhereItCanBeTaken) {
  const CopyShape rows{
      .pieces = 8, .bytes = 8192, .largest = 1024, .rows = true, .to_in_row = true};
  for (const CopyWay way : kAll) {
    EXPECT_EQ(cheapest(costs_that_favour(way), CopyRoute::kToHost, rows,
                       ways_for(CopyRoute::kToHost, rows)),
              way);
  }
  const CopyShape uneven{.pieces = 8, .bytes = 8000, .largest = 1024};
  EXPECT_NE(cheapest(costs_that_favour(CopyWay::kRows), CopyRoute::kToHost, uneven,
                     ways_for(CopyRoute::kToHost, uneven)),
            CopyWay::kRows);
  EXPECT_THAT(explain(costs_that_favour(CopyWay::kPacked), CopyRoute::kToHost, rows,
                      ways_for(CopyRoute::kToHost, rows)),
              HasSubstr("8 pieces, 8192 bytes, to host: packed 0.0 us, single 1000.0 us"));
}

class CopierTest : public WithDevice {
 protected:
  static constexpr size_t kBytes = 10 << 20;  // at each end: more than is packed at a time
  static constexpr CopyRoute kRoute = CopyRoute::kOnDevice;  // of two pieces

  CopierTest() : WithDevice({.memory_bytes = 64 << 20}) {
    auto copier = Copier::open(*device_, launcher_.get(), device_->stream(Direction::kToHost));
    EXPECT_TRUE(copier.ok()) << copier.status();
    copier_ = *std::move(copier);
    memory_ = fake_.allocate(2 * kBytes);
    host_.resize(kBytes);
    const Device::Current current(*device_);
    EXPECT_EQ(device_->driver().cuMemHostRegister(host_.data(), kBytes, kHostPortable), kSuccess);
  }
  ~CopierTest() override {
    fake_.run_all();
    {
      const Device::Current current(*device_);
      device_->driver().cuMemHostUnregister(host_.data());
    }
    fake_.free(memory_);
  }
  DevicePointer from(CopyRoute route) const {
    return route == CopyRoute::kToDevice ? address(host_) : memory_;
  }
  DevicePointer to(CopyRoute route) const {
    return route == CopyRoute::kToHost ? address(host_) : memory_ + kBytes;
  }
  static DevicePointer address(const std::string& host) {
    return static_cast<DevicePointer>(reinterpret_cast<uintptr_t>(host.data()));
  }
  // The bytes at an end, and other ones there.
  std::string bytes_at(DevicePointer at) {
    return at == address(host_) ? host_ : fake_.read(at, kBytes);
  }
  void fill(DevicePointer at, uint64_t seed) {
    std::mt19937_64 random(seed);
    std::string bytes(kBytes, '\0');
    for (size_t i = 0; i < kBytes; i += 8) {
      const uint64_t word = random();
      std::copy_n(reinterpret_cast<const char*>(&word), 8, &bytes[i]);
    }
    if (at == address(host_)) {
      std::copy(bytes.begin(), bytes.end(), host_.begin());
    } else {
      fake_.write(at, bytes);
    }
  }
  // Two pieces that lie apart, and whether they came.
  std::vector<CopyPiece> two(size_t at) const {
    const DevicePointer source = from(kRoute) + at, target = to(kRoute) + at;
    return {{source, target, 100}, {source + 200, target + 300, 100}};
  }
  void expect_two(size_t at, const std::string& source) {
    EXPECT_EQ(fake_.read(to(kRoute) + at, 100), source.substr(at, 100));
    EXPECT_EQ(fake_.read(to(kRoute) + at + 300, 100), source.substr(at + 200, 100));
  }
  // Copies and compares with a copy on the host.
  void expect_copied(CopyRoute route, const std::vector<CopyPiece>& pieces) {
    const std::string source = bytes_at(from(route));
    std::string wanted = bytes_at(to(route));
    for (const CopyPiece& piece : pieces) {
      source.copy(&wanted[piece.to - to(route)], piece.bytes, piece.from - from(route));
    }
    const absl::Status status = copier_->copy(route, pieces);
    ASSERT_TRUE(status.ok()) << status;
    fake_.run_all();
    EXPECT_TRUE(bytes_at(to(route)) == wanted);
  }

  std::unique_ptr<Copier> copier_;
  DevicePointer memory_ = 0;
  std::string host_;
};

// Pages of one size in any order at the source, in a row at the target.
std::vector<CopyPiece> pages(DevicePointer from, DevicePointer to, size_t page, size_t count,
                             std::mt19937_64& random) {
  std::vector<CopyPiece> out(count);
  for (size_t i = 0; i < count; ++i) out[i] = {from + 2 * i * page, to + i * page, page};
  for (size_t i = count; i > 1; --i) std::swap(out[i - 1].from, out[random() % i].from);
  return out;
}

// Lists of any shape, on every route, with tables that favour one way or the other.
TEST_F(CopierTest, AnyListIsCopiedWhateverTheTableSays) {
  for (uint64_t seed = 0; seed < 15; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    const CopyRoute route = kRoutes[seed % 3];
    copier_->set_table(costs_that_favour(kAll[seed / 3]));
    std::vector<CopyPiece> pieces;
    const size_t most = size_t{1} << (4 + random() % 14);
    DevicePointer target = to(route) + random() % 64;
    for (size_t i = 0; i < 1 + random() % 700; ++i) {
      const size_t bytes = random() % most;
      const bool next = !pieces.empty() && random() % 3 == 0;  // a neighbour
      const DevicePointer source = next ? pieces.back().from + pieces.back().bytes
                                        : from(route) + random() % (kBytes - 2 * most);
      if (source + bytes > from(route) + kBytes || target + bytes > to(route) + kBytes) break;
      pieces.push_back({source, target, bytes});
      target += bytes + (seed % 2 == 0 ? 0 : random() % 40);
    }
    fill(from(route), seed + 100);
    expect_copied(route, pieces);
  }
  EXPECT_LE(fake_.largest_copy(), Copier::kMostBytes);
}

TEST_F(CopierTest, WhatTheTableFavoursIsCalled) {
  std::mt19937_64 random(3);
  const std::vector<CopyPiece> pieces =
      pages(from(CopyRoute::kToHost), to(CopyRoute::kToHost), 2048, 64, random);
  const auto calls = [&](CopyWay way) {
    copier_->set_table(costs_that_favour(way));
    const std::vector<uint64_t> before = {fake_.calls_of("cuMemcpyAsync"),
                                          fake_.calls_of("cuMemcpyBatchAsync"),
                                          fake_.calls_of("cuLaunchKernel")};
    EXPECT_TRUE(copier_->copy(CopyRoute::kToHost, pieces).ok());
    fake_.run_all();
    return std::vector<uint64_t>{fake_.calls_of("cuMemcpyAsync") - before[0],
                                 fake_.calls_of("cuMemcpyBatchAsync") - before[1],
                                 fake_.calls_of("cuLaunchKernel") - before[2]};
  };
  EXPECT_EQ(calls(CopyWay::kSingle), (std::vector<uint64_t>{64, 0, 0}));
  EXPECT_EQ(calls(CopyWay::kBatch), (std::vector<uint64_t>{0, 1, 0}));
  EXPECT_EQ(calls(CopyWay::kPacked), (std::vector<uint64_t>{1, 0, 1}));
  EXPECT_EQ(calls(CopyWay::kKernel), (std::vector<uint64_t>{0, 0, 1}));
}

// A batch's pieces move in any order, and the driver takes none that write the same bytes.
TEST_F(CopierTest, PiecesThatWriteTheSameBytesAreNoBatch) {
  copier_->set_table(costs_that_favour(CopyWay::kBatch));
  const CopyRoute route = CopyRoute::kToDevice;
  constexpr size_t kPage = 256;
  fill(from(route), 5);
  const std::string source = bytes_at(from(route));
  // The same page again and again; pages that overlap by half; backwards; backwards without.
  for (const auto& [step, batches] : std::vector<std::pair<int, uint64_t>>{
           {0, 0}, {kPage / 2, 0}, {-static_cast<int>(kPage) / 2, 0}, {-2 * int{kPage}, 2}}) {
    SCOPED_TRACE(step);
    fill(to(route), 6);
    std::vector<CopyPiece> pieces;
    for (int i = 0; i < 1200; ++i) {  // more than one batch's
      pieces.push_back({from(route) + 2 * i * kPage, to(route) + (1 << 20) + i * step, kPage});
    }
    const uint64_t before = fake_.calls_of("cuMemcpyBatchAsync");
    expect_copied(route, pieces);  // and so in their order
    EXPECT_EQ(fake_.calls_of("cuMemcpyBatchAsync") - before, batches);
  }
}

// Five launches, and lists for four: the last goes without.
TEST_F(CopierTest, WhenAllListsAreInUseItGoesWithoutKernels) {
  copier_->set_table(costs_that_favour(CopyWay::kKernel));
  fill(from(kRoute), 1);
  const std::string source = bytes_at(from(kRoute));
  for (size_t i = 0; i < 12; ++i) ASSERT_TRUE(copier_->copy(kRoute, two(i * 4096)).ok());
  fake_.run_all();
  for (size_t i = 0; i < 12; ++i) expect_two(i * 4096, source);
}

// A launch whose mark could not be made still reads its list: the next one gets another.
TEST_F(CopierTest, AListThatALaunchStillReadsIsNotUsedAgain) {
  fill(from(kRoute), 1);
  const std::string source = bytes_at(from(kRoute));
  for (int i = 0; i < 20; ++i) {  // what the stream has to do before
    ASSERT_TRUE(copier_->copy_by(CopyWay::kSingle, kRoute, two(8192)).ok());
  }
  fake_.fail_next("cuEventRecord", kOutOfMemory);
  EXPECT_FALSE(copier_->copy_by(CopyWay::kKernel, kRoute, two(0)).ok());
  ASSERT_TRUE(copier_->copy_by(CopyWay::kKernel, kRoute, two(4096)).ok());
  fake_.run_all();
  for (const size_t at : {0, 4096}) expect_two(at, source);
}

TEST_F(CopierTest, MeasuringFillsTheTable) {
  ASSERT_TRUE(copier_->measure(1).ok());
  for (const CopyRoute route : kRoutes) {
    for (const CopyWay way : kAll) {
      const double cost = copier_->table().nanoseconds(route, way, 10, 10 << 14);
      EXPECT_EQ(cost >= 1e18, route == CopyRoute::kOnDevice && way == CopyWay::kPacked);
      EXPECT_GT(cost, 0);
    }
  }
}

TEST(Copier, WithoutKernelsAndBatchesItCopiesPieceByPiece) {
  CleanDriver fake({.missing = {"cuMemcpyBatchAsync"}});
  const auto device = Device::open(FakeDriver::driver(), 0);
  const DevicePointer memory = fake.allocate(4 << 20);
  auto copier = must(Copier::open(**device, nullptr, (*device)->stream(Direction::kToHost)));
  const std::vector<CopyPiece> pieces = {{memory, memory + 4096, 10},
                                         {memory + 20, memory + 9000, 30}};
  EXPECT_EQ(copier->explain(CopyRoute::kOnDevice, pieces),
            "2 pieces, 40 bytes, on device: single 0.0 us");
  fake.write(memory, "0123456789");
  EXPECT_TRUE(copier->copy(CopyRoute::kOnDevice, pieces).ok());
  fake.run_all();
  EXPECT_EQ(fake.read(memory + 4096, 10), "0123456789");
  fake.free(memory);
}

}  // namespace
}  // namespace baton::gpudirect
