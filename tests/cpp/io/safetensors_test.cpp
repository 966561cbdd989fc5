#include "zorro/io/safetensors.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "cpp/io/temporary_folder.h"
#include "zorro/core/error.h"

namespace zorro {
namespace {

std::string with_length(const std::string& header, const std::string& data = "") {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>((header.size() >> (8 * i)) & 0xff);
  return bytes + header + data;
}

/// Opening these bytes must fail with a message that has `part` in it.
void expect_refused(const std::string& bytes, const std::string& part) {
  const TemporaryFolder folder;
  const auto path = folder.write("x.safetensors", bytes);
  try {
    SafetensorsFile::open(path);
    ADD_FAILURE() << "accepted: " << part;
  } catch (const CheckpointError& error) {
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("x.safetensors"), std::string::npos);
  }
}

NamedTensors some_tensors() {
  return {{"half", at::arange(6, at::kFloat).view({2, 3}).to(at::kHalf)},
          {"transposed", at::arange(6, at::kFloat).view({2, 3}).t()},
          {"scalar", at::scalar_tensor(3.5, at::kDouble)},
          {"empty", at::empty({0, 4}, at::kFloat)},
          {"brain", at::arange(3, at::kFloat).to(at::kBFloat16)},
          {"flags", at::tensor({1, 0, 1}).to(at::kBool)},
          {"ids", at::arange(3, at::kLong)}};
}

TEST(Safetensors, WhatIsWrittenIsReadBackBitForBit) {
  const TemporaryFolder folder;
  write_safetensors(folder / "a.safetensors", some_tensors());
  const SafetensorsFile file = SafetensorsFile::open(folder / "a.safetensors");
  EXPECT_EQ(file.metadata().at("format"), "pt");
  EXPECT_EQ(file.names().size(), 7U);
  for (const auto& [name, tensor] : some_tensors()) {
    EXPECT_EQ(file.entry(name).shape, tensor.sizes().vec());
    EXPECT_EQ(file.entry(name).dtype, tensor.scalar_type());
    EXPECT_TRUE(at::equal(file.tensor(name), tensor)) << name;
  }
  EXPECT_EQ(folder.num_entries(), 1U);
  write_safetensors(folder / "b.safetensors", some_tensors());
  EXPECT_EQ(read_bytes(folder / "a.safetensors"), read_bytes(folder / "b.safetensors"));
}

TEST(Safetensors, ATensorKeepsTheMappingAlive) {
  const TemporaryFolder folder;
  write_safetensors(folder / "a.safetensors", some_tensors());
  const at::Tensor ids = SafetensorsFile::open(folder / "a.safetensors").tensor("ids");
  EXPECT_EQ(ids.sum().item<int64_t>(), 3);
}

TEST(Safetensors, UnalignedDataIsCopied) {
  const TemporaryFolder folder;
  const std::string header =
      R"({"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"f":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}})";
  const float one = 1.5F;
  const std::string data =
      std::string(1, 'x') + std::string(reinterpret_cast<const char*>(&one), 4);
  const auto path = folder.write("odd.safetensors", with_length(header, data));
  EXPECT_EQ(SafetensorsFile::open(path).tensor("f").item<float>(), 1.5F);
}

TEST(Safetensors, B43_CutAndForeignFilesAreRefused) {
  const TemporaryFolder folder;
  NamedTensors large = {{"w", at::zeros({5000})}};
  write_safetensors(folder / "a.safetensors", large);
  const std::string good = read_bytes(folder / "a.safetensors");
  expect_refused(good.substr(0, good.size() - 1), "\"w\"");
  expect_refused(good.substr(0, good.size() - 10'000), "The file is cut");
  expect_refused(good + "x", "must end with its last tensor");
  expect_refused("abcd", "8-byte header");
  expect_refused("", "8-byte header");
  expect_refused("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n",
                 "git lfs pull");
  expect_refused(good.substr(0, 20), "The file is cut");
  EXPECT_THROW(SafetensorsFile::open(folder / "absent.safetensors"), CheckpointError);
  EXPECT_THROW(SafetensorsFile::open(folder.path()), CheckpointError);
}

TEST(Safetensors, B43_AHeaderOf100000BytesLoads) {
  const TemporaryFolder folder;
  std::string header = R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})";
  header.resize(100'000, ' ');
  const auto path = folder.write("a.safetensors", with_length(header, std::string(4, '\0')));
  EXPECT_EQ(SafetensorsFile::open(path).tensor("a").numel(), 1);
}

TEST(Safetensors, LyingHeadersAreRefused) {
  const auto entry = [](const std::string& dtype, const std::string& shape,
                        const std::string& offsets) {
    return R"({"a":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" +
           offsets + "}}";
  };
  const std::string four(4, '\0');
  expect_refused(with_length("not json"), "must begin with '{'");
  expect_refused(with_length("{\"a\":"), "not valid JSON");
  expect_refused(with_length(R"({"a":{},"a":{}})"), "duplicate key");
  expect_refused(with_length(R"({"a":3})"), "must have dtype");
  expect_refused(with_length(R"({"__metadata__":3})"), "__metadata__");
  expect_refused(with_length(R"({"__metadata__":{"k":1}})"), "must be a string");
  expect_refused(with_length(entry("F8_E4M3", "[4]", "[0,4]"), four), "F8_E4M3");
  expect_refused(with_length(entry("F32", "[2]", "[0,4]"), four), "must span 8 bytes");
  expect_refused(with_length(entry("F32", "[1]", "[4,0]"), four), "must span 4 bytes");
  expect_refused(with_length(entry("F32", "[-1]", "[0,4]"), four), "non-negative integer");
  expect_refused(with_length(entry("F32", "[1.0]", "[0,4]"), four), "non-negative integer");
  expect_refused(with_length(entry("F32", "[1]", "[4,8]"), four + four), "must begin at byte 0");
  expect_refused(with_length(entry("F32", "[4611686018427387904,4]", "[0,0]")), "too large");
  expect_refused(with_length(entry("F32", "[1]", "[0,4]"), "ab"), "The file is cut");
  expect_refused(
      with_length(
          R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}})",
          "abcdef"),
      "not overlap");
  expect_refused(std::string("\xff\xff\xff\xff\xff\xff\xff\xff", 8) + "{}", "at most 100000000");
  expect_refused(with_length(std::string(100, '[') + "{"), "must begin");
  expect_refused(with_length("{\"a\":" + std::string(100, '[')), "not valid JSON");
}

TEST(Safetensors, AFailedWriteLeavesNothing) {
  const TemporaryFolder folder;
  EXPECT_THROW(write_safetensors(folder / "absent/a.safetensors", some_tensors()), CheckpointError);
  EXPECT_THROW(
      write_safetensors(folder / "a.safetensors", {{"x", at::zeros({1}, at::kComplexFloat)}}),
      CheckpointError);
  EXPECT_THROW(
      write_safetensors(folder / "a.safetensors", {{"x", at::zeros({1})}, {"x", at::zeros({1})}}),
      CheckpointError);
  EXPECT_EQ(folder.num_entries(), 0U);
}

TEST(Safetensors, AnUnknownNameIsAnError) {
  const TemporaryFolder folder;
  write_safetensors(folder / "a.safetensors", some_tensors());
  EXPECT_THROW(SafetensorsFile::open(folder / "a.safetensors").tensor("nobody"), CheckpointError);
}

class Folder : public testing::Test {
 protected:
  void shard(const std::string& file, const NamedTensors& tensors) {
    write_safetensors(folder_ / file, tensors);
  }
  void index(const std::string& weight_map) {
    folder_.write("model.safetensors.index.json",
                  R"({"metadata":{},"weight_map":)" + weight_map + "}");
  }
  void expect_refused(const std::string& part) {
    try {
      CheckpointFolder::open(folder_.path());
      ADD_FAILURE() << "accepted: " << part;
    } catch (const CheckpointError& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  }
  TemporaryFolder folder_;
};

TEST_F(Folder, OneFileAndShardsAreRead) {
  shard("one.safetensors", {{"a", at::zeros({1})}});
  EXPECT_TRUE(CheckpointFolder::open(folder_.path()).contains("a"));
  shard("two.safetensors", {{"b", at::ones({2})}});
  index(R"({"a":"one.safetensors","b":"two.safetensors"})");
  const CheckpointFolder both = CheckpointFolder::open(folder_.path());
  EXPECT_EQ(both.names(), (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(both.tensor("b").sum().item<float>(), 2);
  EXPECT_THROW(both.tensor("c"), CheckpointError);
  EXPECT_THROW(both.entry("c"), CheckpointError);
}

TEST_F(Folder, B43_FoldersThatDoNotFitTheirIndexAreRefused) {
  expect_refused("got neither");
  shard("one.safetensors", {{"a", at::zeros({1})}, {"b", at::zeros({1})}});
  shard("two.safetensors", {{"c", at::ones({2})}});
  expect_refused("must have model.safetensors.index.json");
  index(R"({"a":"one.safetensors","b":"one.safetensors","c":"three.safetensors"})");
  expect_refused("three.safetensors");
  index(R"({"a":"one.safetensors","b":"two.safetensors","c":"two.safetensors"})");
  expect_refused("\"b\"");
  index(R"({"a":"one.safetensors","c":"two.safetensors"})");
  expect_refused("must be listed");
  for (const char* file :
       {"../one.safetensors", "/one.safetensors", "x/one.safetensors", "..", "", "x\\\\y"}) {
    index(concat(R"({"a":")", file, R"("})"));
    expect_refused("plain file name");
  }
  index("{}");
  expect_refused("must not be empty");
  index("3");
  expect_refused("weight_map");
  folder_.write("model.safetensors.index.json", "{");
  expect_refused("not valid JSON");
  EXPECT_THROW(CheckpointFolder::open(folder_ / "absent"), CheckpointError);
}

}  // namespace
}  // namespace zorro
