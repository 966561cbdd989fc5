namespace zorro {}
