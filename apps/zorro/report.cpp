#include "report.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <iostream>

namespace zorro::app {
namespace {

/// Columns on a screen: bytes that do not continue a UTF-8 character.
size_t width_of(const std::string& text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char byte) { return (byte & 0xC0) != 0x80; }));
}

bool is_number(const std::string& text) {
  return !text.empty() && (text[0] == '-' || (text[0] >= '0' && text[0] <= '9'));
}

}  // namespace

Table::Table(std::vector<std::string> header) : rows_{std::move(header)} {}

void Table::add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }

void Table::print() const {
  std::vector<size_t> widths(rows_.front().size(), 0);
  for (const auto& row : rows_)
    for (size_t column = 0; column < row.size(); ++column)
      widths[column] = std::max(widths[column], width_of(row[column]));
  for (const auto& row : rows_) {
    std::string line;
    for (size_t column = 0; column < row.size(); ++column) {
      const std::string pad(widths[column] - width_of(row[column]), ' ');
      if (column > 0) line += "  ";
      line += is_number(row[column]) ? pad + row[column] : row[column] + pad;
    }
    line.erase(line.find_last_not_of(' ') + 1);
    std::cout << line << "\n";
  }
}

std::string number_text(const char* format, double value) {
  char text[64];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

std::string rate_text(double flops_per_second) {
  return number_text("%.1f GF/s", flops_per_second / 1e9);
}

std::string seconds_text(double seconds) {
  return seconds < 1 ? number_text("%.1f ms", seconds * 1e3) : number_text("%.2f s", seconds);
}

std::string exact_text(double value) {
  char text[64];
  const auto [end, error] = std::to_chars(std::begin(text), std::end(text), value);
  return {std::begin(text), end};
}

void print_json(const Json& object) { std::cout << object.dump(2) << "\n"; }

}  // namespace zorro::app
